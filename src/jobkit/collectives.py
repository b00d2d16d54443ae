"""Collective operations on a ring of ranks: their hops, and what each link carries.

These are the formulas behind the bus bandwidth of nccl-tests (its doc/PERFORMANCE.md).
"""

_PASSES = {"all_reduce": 2}  # around the ring: a reduce-scatter, then an all-gather


def passes(operation: str) -> int:
    """How often an operation goes around the ring."""
    return _PASSES.get(operation, 1)


def bus_factor(operation: str, ranks: int) -> float:
    """What each link carries, as a share of the operation's bytes: bus over algorithm bandwidth."""
    if operation in ("broadcast", "sendrecv"):
        return 1.0
    return passes(operation) * (ranks - 1) / ranks
