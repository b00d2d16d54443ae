"""What a process of a preflight finds out about itself and its node: plain data, no judgement."""

import contextlib
import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

import jobkit
from jobkit.errors import UsageError
from jobkit.files import open_regular
from jobkit.gpus import gpu_state
from jobkit.payload.data import find_source
from jobkit.payload.device import git_commit
from jobkit.payload.device import versions as versions_of
from jobkit.payload.distributed import candidate
from jobkit.payload.place import (
    RankEnv,
    expand_nodes,
    read_rank_env,
    read_slurm,
    share_of_cores,
)

Facts = dict[str, Any]
_PCI = Path("/sys/bus/pci/devices")
T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """Return the call's value, or `otherwise` where it takes longer, as file systems may hang.

    The call then continues in its thread, and must do no harm there. What it raises is raised.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    return done[0] if done else otherwise


def claimed_place(environ: Mapping[str, str]) -> tuple[RankEnv, str]:
    """Return the process's place, and what is wrong with it: then as much of it as can be read."""
    try:
        return read_rank_env(environ), ""
    except UsageError as error:
        fault = str(error)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        fault = f"the launcher's variables cannot be read: {error!r}"
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    try:
        rough = {**environ, "SLURM_NTASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": tasks}
        return RankEnv(**read_slurm(rough), job_id=environ.get("SLURM_JOB_ID")), fault
    except (UsageError, KeyError, ValueError, ZeroDivisionError):
        address, port = environ.get("MASTER_ADDR", "127.0.0.1"), environ.get("MASTER_PORT", "")
        return RankEnv(master_addr=address, master_port=int(port) if port.isdigit() else 0), fault


def addresses_of(name: str, timeout_s: float = 8.0) -> list[str]:
    """Return the addresses that a name resolves to here; none where it does not in time."""

    def look() -> list[str]:
        with contextlib.suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        return []

    return within(timeout_s, look, [])


def source_digest(folder: Path) -> str:
    """Return twelve hexadecimal digits that differ where a file of the package does."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> str:
    """Return the same for processes that share a kernel and a network, as simulated nodes do."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def whole_number(text: str | None) -> int | None:
    """Return the number that a variable holds, or None where it holds none."""
    return int(text) if text and text.isdigit() else None


def who(place: RankEnv, fault: str, environ: Mapping[str, str]) -> Facts:
    """Return the process's place, as it believes and as the launcher knows."""
    nodes: list[str] = []
    with contextlib.suppress(ValueError):
        nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
    agent = "TORCHELASTIC_RUN_ID" in environ
    step = None if agent else whole_number(environ.get("SLURM_STEP_NUM_TASKS"))
    claimed = whole_number(environ.get("RANK", environ.get("SLURM_PROCID")))
    return {
        "rank": claimed if fault and claimed is not None else place.rank,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
        "local_world_size": place.local_world_size,
        "place_fault": fault,
        "tasks": step,
        "nodes": nodes,
        "host": environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "pid": os.getpid(),
        "machine": machine(),
        "master_addr": place.master_addr,
        "master_port": place.master_port,
    }


def gpu(place: RankEnv, wanted: str) -> Facts:
    """Return the GPU that the rank would compute on, and what torch was built for."""
    device = candidate(wanted, place)
    absent = wanted == "cuda" and not device.visible
    fault = device.fault or ("--device cuda, and no GPU is visible" if absent else "")
    fact = {"gpus": device.visible, "gpu_fault": fault}
    if not (device.visible or fault):
        return fact
    fact |= {
        "driver": gpu_state(device.uuid).get("driver", ""),
        "torch_cuda": str(torch.version.hip or torch.version.cuda),
        "architectures": torch.cuda.get_arch_list() if torch.cuda.is_available() else [],
    }
    if device.visible:
        major, minor = torch.cuda.get_device_capability(device.index)
        fact |= {
            "gpu": device.uuid or device.bus,
            "gpu_bus": device.bus,
            "gpu_name": device.name,
            "gpu_cores": cpus(
                read_line(Path("/sys/bus/pci/devices") / device.bus / "local_cpulist")
            ),
            "capability": "" if torch.version.hip else f"sm_{major}{minor}",
        }
    return fact


def cpus(text: str) -> list[int]:
    """Return the numbers of a kernel's list such as 0-3,8."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def cores(place: RankEnv, environ: Mapping[str, str]) -> Facts:
    """Return the cores that the rank may use, and the threads that it will start."""
    threads = whole_number(environ.get("OMP_NUM_THREADS"))
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count() or 1,
        "threads": threads or share_of_cores(place.local_world_size, environ),
    }


def versions(place: RankEnv) -> Facts:
    """Return versions that must be equal, and the commit, which only explains a difference."""
    cuda = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digest = within(10, lambda: source_digest(Path(jobkit.__file__).parent), "unreadable")
    commit = git_commit() if place.local_rank == 0 else None
    values = {**versions_of(cuda), "jobkit": f"{jobkit.__version__} (source {digest})"}
    return {"versions": values, "commit": commit, "system": platform.platform()}


def names(place: RankEnv, environ: Mapping[str, str]) -> Facts:
    """Return what the master's name and the machine's own resolve to, seen from here."""
    return {
        "master_ips": addresses_of(place.master_addr),
        "hostname": socket.gethostname(),
        "own_ips": addresses_of(socket.gethostname()),
        "interface": environ.get("GLOO_SOCKET_IFNAME", ""),
    }


def write_fault(folder: Path) -> str:
    """Return why this process cannot write to the folder (which it makes); empty where it can."""
    probe = folder / f".preflight-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"

    def attempt() -> str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with probe.open("x") as file:  # never through a link that somebody left there
                file.write("preflight")
            probe.unlink()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    return within(10, attempt, "no answer from the file system within 10 s")


def source(dataset: str, data_dir: Path, sizes: tuple[int | None, int | None]) -> Facts:
    """Return, on the rank that prepares the data, where their cache is, and what is wrong."""

    def look() -> Facts:
        try:
            source = find_source(dataset, data_dir, *sizes, download=False)
        except UsageError as error:
            return {"data_fault": str(error)}
        path = source.file(data_dir)
        return {"cache": str(path), "cached": not unreadable(path), "data_fault": ""}

    late = {"data_fault": f"{data_dir}: no answer from the file system within 20 s"}
    return within(20, look, late)


def unreadable(path: Path) -> str:
    """Return why a prepared file cannot be read to its end; empty where it can."""
    try:
        with open_regular(path) as file:
            file.seek(-1, os.SEEK_END)
            file.read(1)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return ""


def look_at(folders: Mapping[str, str], name: str, cache: str | None) -> Facts:
    """Return what this node sees of the shared folders: the coordinator's file, and the cache.

    folders: the path of each for the coordinator, and for this rank.
    """

    def look() -> Facts:
        hidden = [theirs for theirs, ours in folders.items() if not (Path(ours) / name).is_file()]
        return {"hidden": hidden, "cache_fault": unreadable(Path(cache)) if cache else ""}

    late = {"hidden": [], "cache_fault": "no answer from the file system within 8 s"}
    return within(8, look, late)


def read_line(path: Path) -> str:
    """Return the text of a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nics(root: Path = Path("/sys/class")) -> dict[str, float]:
    """Return the rate in Gb/s of each active interface made for RDMA, by name.

    InfiniBand, RoCE and EFA: ABI/stable/sysfs-class-infiniband of the kernel; Slingshot: hsn*.
    """
    rates = {}
    for port in sorted(root.glob("infiniband/*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", read_line(port / "rate"))
        if rate and "ACTIVE" in read_line(port / "state"):
            rates[f"{port.parent.parent.name}:{port.name}"] = float(rate[1])
    for path in sorted(root.glob("net/hsn*")):
        speed = read_line(path / "speed")  # in Mb/s
        if speed.isdigit():
            rates[path.name] = int(speed) / 1000
    return rates


def limits() -> dict[str, Any]:
    """Return the process's limits that many ranks, shared memory and RDMA run into."""
    unlimited = resource.RLIM_INFINITY
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    files, locked = (resource.getrlimit(kind)[0] for kind in kinds)
    shm_mib = -1
    with contextlib.suppress(OSError):
        shm_mib = shutil.disk_usage("/dev/shm").free // 2**20
    return {
        "open_files": -1 if files == unlimited else files,
        "memlock_mib": -1 if locked == unlimited else locked // 2**20,
        "shm_mib": shm_mib,
        "nics": nics(),
    }
