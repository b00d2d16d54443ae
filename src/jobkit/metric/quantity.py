"""What the name of a value says of it: its quantity and its unit, as step_time_ms or tokens_per_s.

    quantity_of("step_time_ms")           the time of one step, scale 0.001 to seconds
    quantity_of("tokens_per_s_per_gpu")   a rate in tokens/s, of one rank
    quantity_of("mfu")                    free: a value that has no meaning here

Names are the same for a [METRIC] key=value line and for a group of a pattern. Nothing is guessed: a
name without its unit is free.
"""

import re
from dataclasses import dataclass

SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
MIB = {
    "kib": 2.0**-10,
    "mib": 1.0,
    "gib": 2.0**10,
    "kb": 1e3 / 2**20,
    "mb": 1e6 / 2**20,
    "gb": 1e9 / 2**20,
}
_TIMES = {
    "step_time": "step_time",
    "iteration_time": "step_time",
    "time_per_step": "step_time",
    "data_wait": "data_wait",
    "data_time": "data_wait",
}
_STEP, _EPOCH = ("step", "steps", "iteration", "iter", "global_step"), ("epoch",)
_ALIASES = {"loss": "train_loss", "accuracy": "val_accuracy"}
_TIME = re.compile(rf"({'|'.join(_TIMES)})_({'|'.join(SECONDS)})")
_RATE = re.compile(rf"([a-z]\w*?)_per_({'|'.join(SECONDS)})(_per_(?:gpu|rank|device))?")
_WORK = re.compile(r"([a-z]\w*?)_per_step(_per_(?:gpu|rank|device))?")
_MEMORY = re.compile(rf"(?:peak_)?memory_({'|'.join(MIB)})")


@dataclass(frozen=True)
class Quantity:
    """The meaning of a named value."""

    kind: str  # step, epoch, step_time, data_wait, rate, work, memory or free
    scale: float = 1.0  # times the value: seconds, units per second, MiB
    unit: str = ""  # of a rate or work: tokens, samples, images, steps
    per_rank: bool = False  # the name says that it is of one rank
    name: str = ""  # of a free value: its column


def quantity_of(name: str) -> Quantity:
    """The quantity that a name stands for."""
    plain = name.lower()
    if plain in _STEP:
        return Quantity("step")
    if plain in _EPOCH:
        return Quantity("epoch")
    if found := _TIME.fullmatch(plain):
        return Quantity(_TIMES[found[1]], SECONDS[found[2]])
    if found := _RATE.fullmatch(plain):
        return Quantity("rate", 1 / SECONDS[found[2]], found[1], bool(found[3]))
    if found := _WORK.fullmatch(plain):
        return Quantity("work", 1.0, found[1], bool(found[2]))
    if found := _MEMORY.fullmatch(plain):
        return Quantity("memory", MIB[found[1]])
    return Quantity("free", name=_ALIASES.get(plain, name))
