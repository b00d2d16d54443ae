"""What the machine says while a rank trains: load, memory, energy; a record now and then."""

import contextlib
import ctypes
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .lines import Writer
from .process import guarded, warn

COUNTERS = ("nvml", "pm_counters")
_ROOT = Path("/")
_BUFFER_BYTES = 4096


class Counter(NamedTuple):
    """A counter of energy. joules() grows by what is used; where it begins says nothing."""

    name: str  # one of COUNTERS
    scope: str  # gpu: the process's own; node: all of it
    joules: Callable[[], float]


class Gpu:
    """A GPU as its driver reports it; this one reports nothing."""

    uuid: str | None = None  # says which of the node's it is, where ranks may share one

    def busy(self) -> float | None:
        """The share of the driver's last period in which a kernel was running."""
        return None

    def memory_mib(self) -> float | None:
        """Memory in use, by whom ever."""
        return None

    def processes(self) -> int | None:
        """Processes that compute on it, whoever's."""
        return None

    def counter(self) -> Counter | None:
        """Its counter of energy."""
        return None


class NvidiaGpu(Gpu):
    """By NVML, the library of NVIDIA's driver.

    Not of a part of a GPU (MIG): load and energy of the whole would be those of others as well.
    """

    def __init__(self, library: Any, handle: Any, uuid: str) -> None:
        self._library, self._handle, self.uuid = library, handle, uuid

    def _ask(self, function: str, values: Any) -> bool:
        return bool(getattr(self._library, function)(self._handle, ctypes.byref(values)) == 0)

    def busy(self) -> float | None:
        """See Gpu."""
        rates = (ctypes.c_uint * 2)()  # of kernels and of memory, in per cent
        return rates[0] / 100 if self._ask("nvmlDeviceGetUtilizationRates", rates) else None

    def memory_mib(self) -> float | None:
        """See Gpu."""
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        return memory[2] / 2**20 if self._ask("nvmlDeviceGetMemoryInfo", memory) else None

    def processes(self) -> int | None:
        """See Gpu; with room for none the driver says how many there are."""
        count = ctypes.c_uint(0)
        ask = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        known = ask is not None and ask(self._handle, ctypes.byref(count), None) in (0, 7)
        return count.value if known else None

    def counter(self) -> Counter | None:
        """See Gpu; Volta and newer have one."""
        return Counter("nvml", "gpu", self._joules) if self._millijoules() is not None else None

    def _millijoules(self) -> int | None:
        value = ctypes.c_ulonglong()
        known = self._ask("nvmlDeviceGetTotalEnergyConsumption", value)
        return value.value if known else None

    def _joules(self) -> float:
        value = self._millijoules()
        if value is None:
            raise OSError("NVML does not report the energy of a GPU any more")
        return value / 1000


class AmdGpu(Gpu):
    """By the files of AMD's driver. Its counter of energy is in none of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def busy(self) -> float | None:
        """See Gpu."""
        value = _number(self._folder / "gpu_busy_percent")
        return None if value is None else value / 100

    def memory_mib(self) -> float | None:
        """See Gpu."""
        value = _number(self._folder / "mem_info_vram_used")
        return None if value is None else value / 2**20


def gpus_in_use(number: int = 1, root: Path = _ROOT) -> list[Gpu]:
    """The process's GPUs: torch's current one, or the first `number`; none without a GPU.

    To be called in the thread that chose the GPU.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if not cuda or not (cuda.is_available() and cuda.is_initialized()):
        return []
    first = 0 if number > 1 else cuda.current_device()
    found = [cuda.get_device_properties(first + i) for i in range(number)]
    library = _nvml()
    return [_gpu(one, library, root) for one in found]


def _gpu(properties: Any, library: Any, root: Path) -> Gpu:
    """One GPU by torch's properties of it."""
    parts = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    folder = root / "sys/bus/pci/devices" / "{:04x}:{:02x}:{:02x}.0".format(*parts)
    if -1 not in parts and (folder / "gpu_busy_percent").exists():
        return AmdGpu(folder)
    uuid = str(getattr(properties, "uuid", ""))
    return (nvidia_gpu(library, uuid) if library and uuid else None) or Gpu()


def _nvml() -> Any:
    """NVML, ready to be asked; None where it is not there."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            return library
    return None


def nvidia_gpu(library: Any, uuid: str) -> NvidiaGpu | None:
    """The GPU of a UUID as torch writes it; None where NVML has it not, or in parts."""
    handle, now, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
    if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != 0:
        return None
    code = library.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(pending))
    return None if code == 0 and now.value else NvidiaGpu(library, handle, name.decode())


def gpu_counter(gpus: Sequence[Gpu]) -> Counter | None:
    """One counter of all these GPUs; None where one of them has none."""
    found = [gpu.counter() for gpu in gpus]
    known = [one for one in found if one]
    if not known or len(known) < len(found):
        return None
    return Counter(known[0].name, "gpu", lambda: sum(one.joules() for one in known))


def node_counter(root: Path = _ROOT) -> Counter | None:
    """That of HPE Cray EX: a file such as `1000 J 1234 us`, which everybody may read."""
    path = root / "sys/cray/pm_counters/energy"

    def joules() -> float:
        value, unit = path.read_text().split()[:2]
        if unit != "J":
            raise OSError(f"{path}: in {unit}, not in J")
        return float(value)

    with contextlib.suppress(OSError, ValueError):
        joules()
        return Counter("pm_counters", "node", joules)
    return None


def _number(path: Path) -> float | None:
    """The number in a file; None where it cannot be read."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


class Load:
    """The load of the node's processors between two calls: of all, and of others than the run."""

    def __init__(self, root: Path = _ROOT, mark: str = "") -> None:
        """mark: a word in the environment or the arguments of each process of the run."""
        self._path, self._proc, self._mark = root / "proc/stat", root / "proc", mark.encode()
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
        if not self._mark:
            return 0
        before, self._ticks = self._ticks, {}
        pids = [p.name for p in self._proc.glob("[0-9]*")]
        known, self._is_own = self._is_own, {}
        for pid in pids:
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
        try:
            with self._path.open("rb", buffering=0) as file:
                words = file.read(_BUFFER_BYTES).split(b"\n", 1)[0].split()[1:9]
            ticks = [int(word) for word in words]
        except (OSError, ValueError):
            return None
        return (ticks[3] + ticks[4], sum(ticks)) if len(ticks) > 4 else None


def memory_mib(root: Path = _ROOT) -> float | None:
    """Memory of the node in use: what is not available to a new program."""
    found: dict[bytes, int] = {}
    with contextlib.suppress(OSError, ValueError):
        with (root / "proc/meminfo").open("rb", buffering=0) as file:
            lines = file.read(_BUFFER_BYTES).split(b"\n")
        found = {words[0]: int(words[1]) for line in lines[:5] if len(words := line.split()) > 1}
    total, available = found.get(b"MemTotal:"), found.get(b"MemAvailable:")
    return None if total is None or available is None else (total - available) / 1024


def counters_to_read(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The counters that JOBKIT_ENERGY names, separated by commas: all without it, none for `none`.

    Raises ValueError for a counter that does not exist.
    """
    given = environment.get("JOBKIT_ENERGY", "")
    if given in ("", "none"):
        return () if given else COUNTERS
    for name in given.split(","):
        if name not in COUNTERS:
            raise ValueError(
                f"JOBKIT_ENERGY={given}: no counter of energy is called '{name}': name some of "
                f"{', '.join(COUNTERS)}, separated by commas, or none"
            )
    return tuple(given.split(","))


def node_is_alone(environment: Mapping[str, str]) -> bool:
    """Whether the job has its nodes alone: run.sh asks Slurm; elsewhere the user may say so."""
    return environment.get("JOBKIT_NODE_ALONE") == "1"


_SHORTEST_S, _LONGEST_S = 1.0, 60.0  # between samples
_SAMPLES = 300  # of a run, before they get rarer


def interval_s(age_s: float) -> float:
    """Seconds to the next sample: a 300th of the time so far, from 1 s to a minute."""
    return min(_LONGEST_S, max(_SHORTEST_S, age_s / _SAMPLES))


def first_of_node(environment: Mapping[str, str], rank: int) -> bool:
    """Whether a rank is its node's first, which watches the node."""
    local = environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID")
    return rank == 0 if local is None else int(local) == 0


class Sampler:
    """Writes records of the kind sample from a thread of its own, until stop().

    node: watch the node's processors and memory too, and its energy if the job has it alone. An
    error is one warning, and ends no training. Raises ValueError for a JOBKIT_ENERGY that names no
    counter.
    """

    def __init__(
        self,
        writer: Writer,
        gpus: Sequence[Gpu],
        node: bool,
        environment: Mapping[str, str],
        root: Path = Path("/"),
    ) -> None:
        self.on = True
        self._writer, self._gpus, self._root, self._node = writer, gpus, root, node
        self._host = environment.get("SLURMD_NODENAME") or os.uname().nodename
        self._alone = node_is_alone(environment)
        folder = writer.folder  # of the run, whose name its ranks have been given
        self._load = Load(root, folder.name if folder and node else "")
        there = [node_counter(root) if node and self._alone else None, gpu_counter(gpus)]
        chosen = counters_to_read(environment)
        self.counters: list[Counter] = [one for one in there if one and one.name in chosen]
        uuids = sorted(gpu.uuid for gpu in gpus if gpu.uuid)
        known = uuids if len(uuids) == len(gpus) else []
        # Short: a record is one line, and there may be 16 GPUs.
        self._uuids = hashlib.sha256(" ".join(known).encode()).hexdigest()[:16] if known else None
        self._begin = time.monotonic()
        self._first: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jobkit samples", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
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

    def _energy(self) -> dict[str, float]:
        energy = {}
        for counter in self.counters:
            with contextlib.suppress(OSError, ValueError):  # it is not reported just now
                now = counter.joules()
                since = now - self._first.setdefault(counter.scope, now)
                energy[f"energy_{counter.scope}_j"] = since
        return energy

    def sample(self) -> dict[str, Any]:
        """What is seen now. Energy is counted from the first sample on."""
        busy = [value for gpu in self._gpus if (value := gpu.busy()) is not None]
        used = [value for gpu in self._gpus if (value := gpu.memory_mib()) is not None]
        processes = [value for gpu in self._gpus if (value := gpu.processes()) is not None]
        load, others = self._load.shares() if self._node else (None, None)
        return {
            "at_s": time.monotonic() - self._begin,
            "host": self._host,
            "alone": self._alone,
            "cpu_busy": load,
            "other_load": others,
            "memory_mib": memory_mib(self._root) if self._node else None,
            "gpu_busy": sum(busy) / len(busy) if busy else None,
            "gpu_memory_mib": max(used, default=None),
            "gpu_processes": max(processes, default=None),
            "gpu_uuids": self._uuids,
            **self._energy(),
            "energy_source": ", ".join(f"{c.name} ({c.scope})" for c in self.counters) or None,
        }


def watch(
    opened: Callable[[], Writer | None],
    rank: int,
    environment: Mapping[str, str],
    gpus: int = 1,
) -> Sampler | None:
    """Watch from here on what this rank must: its GPUs, and as its node's first rank the node.

    opened: makes the writer, if there is a folder. None where the rank watches nothing.
    """
    found, node = gpus_in_use(gpus), first_of_node(environment, rank)
    writer = opened() if found or node else None
    if writer is None or not writer.continue_alone():
        return None
    try:
        sampler = Sampler(writer, found, node, environment)
    except ValueError as error:  # run.sh refuses it before; elsewhere the rest is measured
        warn(f"{error}; no energy is counted")
        sampler = Sampler(writer, found, node, {**environment, "JOBKIT_ENERGY": "none"})
    sampler.start()
    return sampler
