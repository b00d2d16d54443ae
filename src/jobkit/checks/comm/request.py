"""What a communication benchmark is asked to measure."""

from dataclasses import dataclass

from jobkit.errors import UsageError, one_of
from jobkit.metric.comm import OPERATIONS

DEFAULT_MAX_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Request:
    """Operations, sizes and times. Raises UsageError for what cannot be used."""

    backend: str = "auto"  # auto, gloo or nccl
    operations: tuple[str, ...] = tuple(OPERATIONS)
    min_bytes: int = 1024
    max_bytes: int | None = None  # None: DEFAULT_MAX_BYTES, or what fits in memory
    factor: int = 4
    iterations: int = 20
    warmup: int = 3
    seconds_per_size: float = 1.0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in self.operations:
            one_of("operation", name, OPERATIONS)
        most = self.min_bytes if self.max_bytes is None else self.max_bytes
        limits = {
            "--factor": (self.factor, 2, 1024),
            "--iterations": (self.iterations, 1, 10**6),
            "--warmup": (self.warmup, 1, 10**6),
            "--seconds-per-size": (self.seconds_per_size, 0.001, 3600),
            "--timeout": (self.timeout_s, 1, 86400),
            "--min-bytes": (self.min_bytes, 4, 2**40),
            "--max-bytes": (most, 4, 2**40),
        }
        for option, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise UsageError(f"{option} {value}: must be from {low} to {high}")
        if most < self.min_bytes:
            raise UsageError(f"--max-bytes {most} is less than --min-bytes {self.min_bytes}")

    def sizes(self, most: int) -> list[int]:
        """Return the sizes in bytes, each --factor times the one before, up to most."""
        found = [self.min_bytes]
        while found[-1] * self.factor <= most:
            found.append(found[-1] * self.factor)
        return found


def check_ranks(ranks: int) -> None:
    """Raise UsageError for fewer than two ranks."""
    if ranks < 2:
        raise UsageError(
            "the benchmark needs at least 2 ranks: say --nproc-per-node 2, or in an allocation "
            "take 2 tasks or more (sbatch --ntasks-per-node, or --nodes)"
        )
