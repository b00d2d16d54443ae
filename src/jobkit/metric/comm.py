"""The communication benchmark's results: bandwidths, their file, and lines fitted to times.

comm.csv has a row for each operation and size; KINDS["comm"] says what its columns are. Sizes and
bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), so that the numbers can be compared.
The bus bandwidth is what each link carries, whatever the number of ranks: it compares with the
hardware's. 1 GB is 10^9 bytes.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from jobkit.errors import UsageError
from jobkit.files import read_text
from jobkit.metric.kinds import KINDS
from jobkit.units import bus_factor

# What `bytes` counts, by operation.
OPERATIONS = {
    "all_reduce": "the buffer of a rank",
    "all_gather": "the output: the inputs of all ranks",
    "reduce_scatter": "the input of a rank: the outputs of all ranks",
    "broadcast": "the buffer of a rank",
    "all_to_all": "the buffer of a rank: its parts for all ranks",
    "sendrecv": "what each of two ranks sends to the other, both at once",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One operation at one size: a row of comm.csv. KINDS["comm"] says what each column means."""

    operation: str
    scope: str  # all ranks, or two of one node (intra_node), or of two (inter_node)
    ranks: int
    nodes: int
    bytes: int  # see OPERATIONS
    iterations: int
    time_s: float
    time_low_s: float
    time_high_s: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float
    correct: bool


COLUMNS = KINDS["comm"]  # of comm.csv: name and meaning
assert list(COLUMNS) == [f.name for f in fields(Sample)]


def sample(
    operation: str,
    scope: str,
    ranks: int,
    nodes: int,
    size: int,
    times: Sequence[float],
    correct: bool,
) -> Sample:
    """Median, spread and bandwidths from the seconds of each iteration."""
    middle = median(times)
    algorithm = size / middle / 1e9
    return Sample(
        operation=operation,
        scope=scope,
        ranks=ranks,
        nodes=nodes,
        bytes=size,
        iterations=len(times),
        time_s=middle,
        time_low_s=min(times),
        time_high_s=max(times),
        algorithm_gb_per_s=algorithm,
        bus_gb_per_s=algorithm * bus_factor(operation, ranks),
        correct=correct,
    )


MAX_MISS = 0.5  # of the time of a size


@dataclass(frozen=True, kw_only=True)
class Line:
    """time = latency_s + bytes x s_per_byte, fitted to one operation of one scope."""

    operation: str
    scope: str
    ranks: int
    nodes: int
    latency_s: float
    s_per_byte: float
    worst_share: float  # the largest relative miss of a size's median

    @property
    def is_bad(self) -> bool:
        """Whether no forecast may use it: it misses a size by much, or size seems to cost none."""
        return self.worst_share > MAX_MISS or self.s_per_byte <= 0

    @property
    def gb_per_s(self) -> float:
        """The algorithm bandwidth that large messages tend to; infinite where size costs none."""
        return 1e-9 / self.s_per_byte if self.s_per_byte else math.inf


def fit_line(samples: Sequence[Sample]) -> Line:
    """Least squares on the times of one operation and scope, with the same relative error at each.

    A weight of 1 / time^2 keeps the largest message from being the only one that counts. Neither
    the latency nor the time of a byte may be below zero: then the line has the other alone.
    """
    weights = [1 / s.time_s**2 for s in samples]
    total = sum(weights)
    points = [(w, s.bytes, s.time_s) for w, s in zip(weights, samples, strict=True)]
    mean_bytes = sum(w * x for w, x, _ in points) / total
    mean_time = sum(w * y for w, _, y in points) / total
    spread = sum(w * (x - mean_bytes) ** 2 for w, x, _ in points)
    slope = sum(w * (x - mean_bytes) * (y - mean_time) for w, x, y in points) / spread
    latency = mean_time - slope * mean_bytes
    if slope < 0:
        latency, slope = mean_time, 0.0
    elif latency < 0:
        latency = 0.0
        slope = sum(w * x * y for w, x, y in points) / sum(w * x * x for w, x, _ in points)
    first = samples[0]
    return Line(
        operation=first.operation,
        scope=first.scope,
        ranks=first.ranks,
        nodes=first.nodes,
        latency_s=latency,
        s_per_byte=slope,
        worst_share=max(abs((latency + slope * x) / y - 1) for _, x, y in points),
    )


def fit_lines(samples: Iterable[Sample]) -> list[Line]:
    """A line for each operation and scope of which two sizes or more were measured rightly."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for s in samples:
        if s.correct:
            groups.setdefault((s.operation, s.scope), []).append(s)
    return [fit_line(group) for group in groups.values() if len({s.bytes for s in group}) > 1]


def to_csv(samples: Iterable[Sample]) -> str:
    """The content of comm.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(s) | {"correct": str(s.correct).lower()} for s in samples)
    return text.getvalue()


def read_csv(path: Path) -> list[Sample]:
    """The samples of a comm.csv; raises UsageError for a file that is none."""
    read: dict[type | str, Any] = {int: int, float: float, str: str}
    read[bool] = {"true": True, "false": False}.__getitem__
    try:
        samples = [
            Sample(**{f.name: read[f.type](row[f.name]) for f in fields(Sample)})
            for row in csv.DictReader(io.StringIO(read_text(path), newline=""))
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        raise UsageError(f"{path} is no comm.csv of `python -m jobkit comm`") from None
    for s in samples:
        if not all(0 < t < math.inf for t in (s.time_s, s.time_low_s, s.time_high_s)):
            raise UsageError(f"{path}: {s.operation} of {s.bytes} bytes has a time that is none")
    return samples
