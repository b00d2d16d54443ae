"""What one process of a preflight finds out about itself and its node: plain data, no judgement."""

import contextlib
import hashlib
import os
import platform
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

import jobkit
from jobkit.checks.preflight.node import read_line
from jobkit.errors import UsageError
from jobkit.files import open_regular
from jobkit.paths import read_json
from jobkit.payload import host
from jobkit.payload.data.cache import cache_folder
from jobkit.payload.data.sources import find_source
from jobkit.payload.distributed import candidate
from jobkit.payload.place import (
    RankEnv,
    expand_nodes,
    read_rank_env,
    read_slurm,
    share_of_cores,
)

Facts = dict[str, Any]
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
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))
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
    given = whole_number(environ.get("RANK", environ.get("SLURM_PROCID")))
    return {
        "rank": given if fault and given is not None else place.rank,
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
    """Return the GPU that the rank would compute on, by its UUID."""
    found = candidate(wanted, place)
    absent = wanted == "cuda" and not found.visible
    fault = found.fault or ("--device cuda, and no GPU is visible" if absent else "")
    if not found.visible:
        return {"gpus": 0, "gpu_fault": fault}
    return {
        "gpus": found.visible,
        "gpu": found.uuid or found.bus,
        "gpu_name": found.name,
        "gpu_cores": read_line(Path("/sys/bus/pci/devices") / found.bus / "local_cpulist"),
    }


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
    commit = host.git_commit() if place.local_rank == 0 else None
    found = {**host.versions(cuda), "jobkit": f"{jobkit.__version__} (source {digest})"}
    return {"versions": found, "commit": commit, "system": platform.platform()}


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
            found = find_source(dataset, data_dir, *sizes, download=False)
        except UsageError as error:
            return {"data_fault": str(error)}
        folder = cache_folder(found, data_dir)
        return {"cache": str(folder), "cached": not unreadable(folder), "data_fault": ""}

    late = {"data_fault": f"{data_dir}: no answer from the file system within 20 s"}
    return within(20, look, late)


def unreadable(cache: Path) -> str:
    """Return why a prepared cache cannot be read; empty where it can. Checksums are not checked.

    Every file that its manifest names is opened and its end is read: all nodes do this at once.
    """
    names = (read_json(cache / "manifest.json") or {}).get("sha256")
    if not isinstance(names, dict):
        return "no manifest.json in it" if cache.is_dir() else "no such folder"
    try:
        for name in names:
            with open_regular(cache / name) as file:
                file.seek(-1, os.SEEK_END)
                file.read(1)
    except OSError as error:
        return f"{name}: {error.strerror}"
    return ""


def look_at(folders: Mapping[str, str], name: str, cache: str | None) -> Facts:
    """Return what this node sees of the shared folders: the coordinator's file, and the cache.

    folders: the path of each for the coordinator, and for this rank.
    """

    def look() -> Facts:
        hidden = [theirs for theirs, own in folders.items() if not (Path(own) / name).is_file()]
        return {"hidden": hidden, "cache_fault": unreadable(Path(cache)) if cache else ""}

    late = {"hidden": [], "cache_fault": "no answer from the file system within 8 s"}
    return within(8, look, late)
