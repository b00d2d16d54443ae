"""Sizes and times in words, and the bus bandwidth of collective operations on a ring of ranks.

The formulas are those behind the bus bandwidth of nccl-tests (its doc/PERFORMANCE.md).
"""

MIB, GIB = 2**20, 2**30  # bytes


def passes(operation: str) -> int:
    """How often an operation goes around the ring: an all-reduce also gathers what it reduced."""
    return 2 if operation == "all_reduce" else 1


def bus_factor(operation: str, ranks: int) -> float:
    """What each link carries, as a share of the operation's bytes: bus over algorithm bandwidth."""
    if operation in ("broadcast", "sendrecv"):
        return 1.0
    return passes(operation) * (ranks - 1) / ranks


def say_bytes(size: float) -> str:
    """A size for people: 1 KiB, 16 MiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.4g} {unit}"
    return f"{size:g} B"


def say_seconds(seconds: float) -> str:
    """A duration for people, in the unit that fits."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"
