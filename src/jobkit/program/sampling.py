"""Watches the machine while a rank trains: load, memory and energy, a record now and then."""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.program.counters import (
    Counter,
    Gpu,
    Load,
    counters_to_read,
    gpu_counter,
    gpus_in_use,
    memory_mib,
    node_counter,
    node_is_alone,
)
from jobkit.program.lines import Writer
from jobkit.program.process import guarded, warn

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
        self._load = Load(root)
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
        return {
            "at_s": time.monotonic() - self._begin,
            "host": self._host,
            "alone": self._alone,
            "cpu_busy": self._load.busy() if self._node else None,
            "memory_mib": memory_mib(self._root) if self._node else None,
            "gpu_busy": sum(busy) / len(busy) if busy else None,
            "gpu_memory_mib": max(used, default=None),
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
