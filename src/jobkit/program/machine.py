"""What the machine says while a rank trains: load, memory, energy; a record now and then."""

import contextlib
import ctypes
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .lines import Writer
from .process import Guarded, cuda_in_use, guarded, host_name, local_rank

_BUFFER_BYTES = 4096
_COUNTERS = {"node": "pm_counters (node)", "gpu": "nvml (gpu)"}  # of energy, by what they are of


class Gpu(NamedTuple):
    """A GPU as its driver reports it, whoever uses it."""

    uuid: str | None = None  # says which of the node's it is, where ranks may share one
    # What is known now: busy, the share of the driver's last period in which a kernel was running;
    # memory_mib, in use; processes that compute on it; joules, a counter of energy.
    read: Callable[[], dict[str, float]] = dict


def nvidia_gpu(library: Any, uuid: str) -> Gpu:
    """The GPU of a UUID as torch writes it, by NVML, the library of NVIDIA's driver.

    Nothing is reported where NVML has it not, nor of a part of a GPU (MIG): load and energy of the
    whole would be those of others as well.
    """
    handle, now, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
        return Gpu()
    code = library.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(pending))
    if code == 0 and now.value:
        return Gpu()

    def ask(function: str, value: Any, *others: Any) -> Any:
        call = getattr(library, f"nvmlDeviceGet{function}", None)  # an older driver may lack it
        return call(handle, ctypes.byref(value), *others) if call else None

    def read() -> dict[str, float]:
        found = {}
        rates = (ctypes.c_uint * 2)()  # of kernels and of memory, in per cent
        if ask("UtilizationRates", rates) == 0:
            found["busy"] = rates[0] / 100
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        if ask("MemoryInfo", memory) == 0:
            found["memory_mib"] = memory[2] / 2**20
        count = ctypes.c_uint(0)  # with room for none the driver says how many there are
        if ask("ComputeRunningProcesses_v3", count, None) in (0, 7):
            found["processes"] = count.value
        millijoules = ctypes.c_ulonglong()  # Volta and newer have it
        if ask("TotalEnergyConsumption", millijoules) == 0:
            found["joules"] = millijoules.value / 1000
        return found

    return Gpu(name, read)


def amd_gpu(folder: Path) -> Gpu:
    """By the files of AMD's driver. Its counter of energy is in none of them."""
    files = {"busy": ("gpu_busy_percent", 100), "memory_mib": ("mem_info_vram_used", 2**20)}

    def read() -> dict[str, float]:
        found = {}
        for name, (file, unit) in files.items():
            with contextlib.suppress(OSError, ValueError):
                found[name] = float((folder / file).read_text()) / unit
        return found

    return Gpu(None, read)


def gpus_in_use(number: int = 1) -> list[Gpu]:
    """The process's GPUs: torch's current one, or the first `number`; none without a GPU.

    To be called in the thread that chose the GPU.
    """
    cuda, library = cuda_in_use(), None
    if not cuda:
        return []
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        library = nvml if nvml.nvmlInit_v2() == 0 else None
    found, first = [], 0 if number > 1 else cuda.current_device()
    for index in range(first, first + number):
        properties = cuda.get_device_properties(index)
        parts = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        folder = Path("/sys/bus/pci/devices", "{:04x}:{:02x}:{:02x}.0".format(*parts))
        uuid = str(getattr(properties, "uuid", ""))
        if (folder / "gpu_busy_percent").exists():
            found.append(amd_gpu(folder))
        else:
            found.append(nvidia_gpu(library, uuid) if library and uuid else Gpu())
    return found


def node_joules(root: Path = Path("/")) -> float | None:
    """The counter of HPE Cray EX: a file such as `1000 J 1234 us`, which everybody may read."""
    with contextlib.suppress(OSError, ValueError):
        value, unit = (root / "sys/cray/pm_counters/energy").read_text().split()[:2]
        return float(value) if unit == "J" else None
    return None


def _first_lines(path: Path) -> list[list[bytes]]:
    """The words of the first lines of a file of /proc; none where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        return [line.split() for line in file.read(_BUFFER_BYTES).split(b"\n")]
    return []


class Load:
    """The load of the node's processors between two calls: of all, and of others than the run."""

    def __init__(self, root: Path, mark: str) -> None:
        """mark: a word in the environment or the arguments of each process of the run."""
        self._proc, self._mark = root / "proc", mark.encode()
        self._before: tuple[int, int] | None = None
        self._is_own: dict[str, bool] = {}  # of the processes that were there at the last call
        self._ticks: dict[str, int] = {}  # of the run's own

    def shares(self) -> tuple[float | None, float | None]:
        """Time that was not idle / time of all cores, 0 to 1, since the last call; that of others.

        The others' is what is neither idle nor the run's, the hypervisor's (steal) included.
        """
        now, own = self._times(), self._own_ticks()
        before, self._before = self._before, now
        if not before or not now or now[1] <= before[1]:
            return None, None
        total = now[1] - before[1]
        busy = min(1.0, max(0.0, 1 - (now[0] - before[0]) / total))
        return busy, max(0.0, busy - own / total) if self._mark else None

    def _own_ticks(self) -> int:
        """Ticks of the run's processes since the last call."""
        before, self._ticks = self._ticks, {}
        known, self._is_own = self._is_own, {}
        for pid in [folder.name for folder in self._proc.glob("[0-9]*")]:
            own = self._is_own[pid] = known[pid] if pid in known else self._of_run(pid)
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                if own:
                    words = (self._proc / pid / "stat").read_text().rsplit(")", 1)[1].split()
                    self._ticks[pid] = int(words[11]) + int(words[12])  # user, system
        return sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in self._ticks.items())

    def _of_run(self, pid: str) -> bool:
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):  # another user's
                if self._mark in (self._proc / pid / name).read_bytes():
                    return True
        return False

    def _times(self) -> tuple[int, int] | None:
        """Ticks idle, waiting for a disk included, and of all kinds (proc(5))."""
        ticks = [int(word) for line in _first_lines(self._proc / "stat")[:1] for word in line[1:9]]
        return (ticks[3] + ticks[4], sum(ticks)) if len(ticks) > 4 else None


def memory_mib(root: Path = Path("/")) -> float | None:
    """Memory of the node in use: what is not available to a new program."""
    lines = _first_lines(root / "proc/meminfo")[:5]
    kib = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    total, available = kib.get(b"MemTotal:"), kib.get(b"MemAvailable:")
    return None if total is None or available is None else (total - available) / 1024


def interval_s(age_s: float) -> float:
    """Seconds to the next sample: a 300th of the time so far, from 1 s to a minute."""
    return min(60.0, max(1.0, age_s / 300))


class Sampler(Guarded):
    """Writes records of the kind sample from a thread of its own, until stop().

    node: watch the node's processors and memory too, and its energy if the job has it alone, which
    run.sh asks Slurm; elsewhere the user may say so. An error is one warning, and ends no training.
    """

    def __init__(
        self,
        writer: Writer,
        gpus: Sequence[Gpu],
        node: bool,
        environment: Mapping[str, str],
        root: Path = Path("/"),
    ) -> None:
        self._writer, self._gpus, self._node, self._root = writer, gpus, node, root
        self._host = host_name(environment)
        self._alone = environment.get("JOBKIT_NODE_ALONE") == "1"
        # The run's ranks have been given the name of its folder.
        self._load = Load(root, writer.folder.name) if node and writer.folder else None
        uuids = sorted(gpu.uuid for gpu in gpus if gpu.uuid)
        known = uuids if len(uuids) == len(gpus) else []
        # Short: a record is one line, and there may be 16 GPUs.
        self._uuids = hashlib.sha256(" ".join(known).encode()).hexdigest()[:16] if known else None
        self._begin = time.monotonic()
        self._first: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jobkit samples", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take the last sample, and end: after the last window, whose energy it bounds."""
        if self._thread.is_alive():
            self._over.set()
            self._thread.join(timeout=5)  # a driver may not answer
        self._writer.close()

    @guarded
    def _watch(self) -> None:
        """Sample until it is over, and once more then."""
        while True:
            over = self._over.is_set()
            with contextlib.suppress(OSError):  # a full disk, of which the meter warns
                self._writer.write("sample", **self.sample())
            if over:
                return
            self._over.wait(interval_s(time.monotonic() - self._begin))

    def sample(self) -> dict[str, Any]:
        """What is seen now. Energy is counted from the first sample on."""
        read = [gpu.read() for gpu in self._gpus]
        busy, used, processes, joules = (
            [of_gpu[name] for of_gpu in read if name in of_gpu]
            for name in ("busy", "memory_mib", "processes", "joules")
        )
        load, others = self._load.shares() if self._load else (None, None)
        now = {
            "node": node_joules(self._root) if self._node and self._alone else None,
            "gpu": sum(joules) if joules and len(joules) == len(read) else None,
        }
        energy = {
            scope: value - self._first.setdefault(scope, value)
            for scope, value in now.items()
            if value is not None
        }
        return {
            "at_s": time.monotonic() - self._begin,
            "host": self._host,
            "alone": self._alone,
            "cpu_busy": load,
            "other_load": others,
            "memory_mib": memory_mib(self._root) if self._load else None,
            "gpu_busy": sum(busy) / len(busy) if busy else None,
            "gpu_memory_mib": max(used, default=None),
            "gpu_processes": max(processes, default=None),
            "gpu_uuids": self._uuids,
            **{f"energy_{scope}_j": value for scope, value in energy.items()},
            "energy_source": ", ".join(_COUNTERS[scope] for scope in energy) or None,
        }


def watch(
    opened: Callable[[], Writer | None], rank: int, environment: Mapping[str, str], gpus: int = 1
) -> Sampler | None:
    """Watch from here on what this rank must: its GPUs, and as its node's first rank the node.

    opened: makes the writer, if there is a folder. None where the rank watches nothing.
    """
    found, node = gpus_in_use(gpus), local_rank(environment, rank) == 0
    writer = opened() if found or node else None
    if writer is None or not writer.continue_alone():
        return None
    sampler = Sampler(writer, found, node, environment)
    sampler.start()
    return sampler
