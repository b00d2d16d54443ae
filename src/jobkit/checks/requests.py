"""What the checks of an allocation are asked: values that the command line and the ranks share."""

from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import UsageError, one_of
from jobkit.metric.comm import OPERATIONS
from jobkit.paths import data_root, expanded
from jobkit.spec.runspec import RunSpec

DEFAULT_MAX_BYTES = 2**30


@dataclass(frozen=True)
class PreflightRequest:
    """What a preflight is to check, and how long it may take."""

    run_dir: Path
    spec: RunSpec
    timeout_s: float
    as_json: bool

    @property
    def group_s(self) -> float:
        """The seconds for the group to form, and for each of its collectives."""
        return max(self.timeout_s / 2, 5.0)

    @property
    def together_s(self) -> float:
        """The seconds for all that the ranks do together."""
        return self.group_s + 12

    @property
    def data_dir(self) -> Path:
        """The folder of the data and their cache."""
        given = self.spec.data_dir
        return expanded(given) if given else data_root()


@dataclass(frozen=True, kw_only=True)
class CommRequest:
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
        largest = self.min_bytes if self.max_bytes is None else self.max_bytes
        for option, value, low, high in (
            ("--factor", self.factor, 2, 1024),
            ("--iterations", self.iterations, 1, 10**6),
            ("--warmup", self.warmup, 1, 10**6),
            ("--seconds-per-size", self.seconds_per_size, 0.001, 3600),
            ("--timeout", self.timeout_s, 1, 86400),
            ("--min-bytes", self.min_bytes, 4, 2**40),
            ("--max-bytes", largest, 4, 2**40),
        ):
            if not low <= value <= high:
                raise UsageError(f"{option} {value}: must be from {low} to {high}")
        if largest < self.min_bytes:
            raise UsageError(f"--max-bytes {largest} is less than --min-bytes {self.min_bytes}")

    def sizes(self, largest: int) -> list[int]:
        """The sizes in bytes, each --factor times the one before, up to the largest."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= largest:
            sizes.append(sizes[-1] * self.factor)
        return sizes


def check_ranks(ranks: int) -> None:
    """Raise UsageError for fewer than two ranks."""
    if ranks < 2:
        raise UsageError(
            "the benchmark needs at least 2 ranks: say --nproc-per-node 2, or in an allocation "
            "take 2 tasks or more (sbatch --ntasks-per-node, or --nodes)"
        )
