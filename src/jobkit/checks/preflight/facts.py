"""What a process of a preflight finds out about itself and its node: plain data, no judgement."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import jobkit
from jobkit.data.images import find_source
from jobkit.errors import UsageError
from jobkit.gpus import gpu_state
from jobkit.paths import data_root, expanded
from jobkit.payload.device import versions
from jobkit.payload.distributed import candidate
from jobkit.payload.place import RankEnv, expand_nodes, share_of_cores
from jobkit.spec.runspec import RunSpec

Facts = dict[str, Any]


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a name resolves to here; none where it does not."""
    with contextlib.suppress(OSError, UnicodeError):
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    return []


def find_facts(place: RankEnv, spec: RunSpec, run_dir: Path, environ: Mapping[str, str]) -> Facts:
    """Return all that a process can find out alone; of the data on the rank that prepares them."""
    threads = environ.get("OMP_NUM_THREADS", "")
    if not threads.isdigit():
        threads = str(share_of_cores(place.local_world_size, environ))
    cuda = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        **who(place, environ),
        **gpu(place, spec.device, environ),
        "cores": sorted(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count() or 1,
        "threads": int(threads),
        "versions": {**versions(cuda), "jobkit": jobkit.__version__},  # equal on all ranks
        "master_ips": addresses_of(place.master_addr),
        "hostname": socket.gethostname(),
        "own_ips": addresses_of(socket.gethostname()),
        "interface": environ.get("GLOO_SOCKET_IFNAME", ""),
        "log_dir": str(run_dir),
        "log_fault": write_fault(run_dir),
    }
    if place.rank == 0:
        folder = expanded(spec.data_dir) if spec.data_dir else data_root()
        facts |= data(spec.dataset, folder, (spec.train_samples, spec.test_samples))
    return facts


def who(place: RankEnv, environ: Mapping[str, str]) -> Facts:
    """Return the process's place, as it believes and as the launcher knows."""
    nodes: list[str] = []
    with contextlib.suppress(ValueError):
        nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
    # torchrun is one task of a node, and its ranks are several.
    tasks = environ.get("SLURM_STEP_NUM_TASKS") if "TORCHELASTIC_RUN_ID" not in environ else None
    machine = socket.gethostname()
    with contextlib.suppress(OSError):  # the same for nodes that are simulated on one machine
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{kernel} {Path('/proc/self/ns/net').readlink()}"
    return {
        **asdict(place),
        "tasks": int(tasks) if tasks and tasks.isdecimal() else None,
        "nodes": nodes,
        "host": environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "pid": os.getpid(),
        "machine": machine,
    }


def gpu(place: RankEnv, wanted: str, environ: Mapping[str, str]) -> Facts:
    """Return the GPU that the rank would compute on, and what torch was built for."""
    device, granted = candidate(wanted, place), environ.get("SLURM_GPUS_ON_NODE", "").lstrip("0")
    why = {"cuda": "--device cuda", "auto": granted and f"Slurm granted {granted} here"}.get(wanted)
    fault = device.fault or (f"{why}, and torch sees no GPU" if why and not device.visible else "")
    names = ("driver", "torch_cuda", "gpu", "gpu_bus", "gpu_name", "capability")
    fact = {"gpus": device.visible, "gpu_fault": fault, "architectures": []}
    fact |= dict.fromkeys(names, "")
    if device.visible or fault:
        fact["driver"] = gpu_state(device.uuid).get("driver", "")
        fact["torch_cuda"] = str(torch.version.hip or torch.version.cuda)
        # Also where the driver is too old for torch.cuda to say it.
        fact["architectures"] = (getattr(torch._C, "_cuda_getArchFlags", str)() or "").split()
    if device.visible:
        major, minor = torch.cuda.get_device_capability(device.index)
        fact["capability"] = "" if torch.version.hip else f"sm_{major}{minor}"
        fact |= {"gpu": device.uuid or device.bus, "gpu_bus": device.bus, "gpu_name": device.name}
    return fact


def write_fault(folder: Path) -> str:
    """Return why this process cannot write to the folder (which it makes); empty where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".preflight-", dir=folder) as file:
            file.write(b"preflight")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def data(dataset: str, data_dir: Path, sizes: tuple[int | None, int | None]) -> Facts:
    """Return, on the rank that prepares the data, where their cache is, and what is wrong.

    cache: None where they are not prepared yet; then they must be there to be prepared, and the
    folder be writable.
    """
    fact: Facts = {"dataset": dataset, "data_dir": str(data_dir), "cache": None, "data_fault": ""}
    try:
        path = find_source(dataset, data_dir, *sizes, download=False)[0]
    except UsageError as error:
        return fact | {"data_fault": str(error)}
    if path.is_file():
        return fact | {"cache": str(path)}
    fault = write_fault(data_dir)
    return fact | ({"data_fault": f"{data_dir} cannot be written: {fault}"} if fault else {})
