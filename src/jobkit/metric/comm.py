"""The communication benchmark's results: bandwidths, lines fitted to times, and their two files.

comm.csv has a row for each operation and size, comm.json the lines fitted to them. Sizes and
bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), so that the numbers can be compared:

    algorithm bandwidth = bytes / time
    bus bandwidth       = algorithm bandwidth x a factor of the operation on n ranks

The bus bandwidth is what each link carries, whatever the number of ranks: it compares with the
hardware's. 1 GB is 10^9 bytes.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from jobkit.errors import UsageError
from jobkit.files import read_text
from jobkit.metric.kinds import KINDS
from jobkit.paths import read_json
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
SCOPES = ("all", "intra_node", "inter_node")  # all ranks, or two of one node, or of two nodes


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One operation at one size. Times are those of the slowest rank in each iteration."""

    operation: str
    scope: str  # of SCOPES
    ranks: int
    nodes: int  # that the ranks are on
    bytes: int  # see OPERATIONS
    iterations: int
    time_s: float  # median
    time_low_s: float  # fastest iteration
    time_high_s: float  # slowest iteration
    algorithm_gb_per_s: float
    bus_gb_per_s: float
    correct: bool  # the result of the last timed iteration, on every rank
    pipelined_time_s: float | None = None  # of one operation in a row of them; None on the CPU


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


# --- the fitted lines ------------------------------------------------------------------------


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
    sizes: int  # that it was fitted to

    @property
    def gb_per_s(self) -> float:
        """The algorithm bandwidth that large messages tend to; infinite where size costs none."""
        return 1e-9 / self.s_per_byte if self.s_per_byte else math.inf


def fit_line(found: Sequence[Sample]) -> Line:
    """Least squares on the times of one operation and scope, with the same relative error at each.

    A weight of 1 / time^2 keeps the largest message from being the only one that counts. Neither
    the latency nor the time of a byte may be below zero: then the line has the other alone.
    Raises ValueError for fewer than two sizes.
    """
    if len({s.bytes for s in found}) < 2:
        raise ValueError("a line needs two sizes")
    first = found[0]
    latency, slope = _weighted_line([float(s.bytes) for s in found], [s.time_s for s in found])
    misses = [abs((latency + slope * s.bytes) / s.time_s - 1) for s in found]
    return Line(
        operation=first.operation,
        scope=first.scope,
        ranks=first.ranks,
        nodes=first.nodes,
        latency_s=latency,
        s_per_byte=slope,
        worst_share=max(misses),
        sizes=len(found),
    )


def _weighted_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, both at least 0, that minimise the sum of ((a + b x - y) / y)^2."""
    weights = [1 / v**2 for v in y]
    total = sum(weights)
    mean_x = sum(w * u for w, u in zip(weights, x, strict=True)) / total
    mean_y = sum(w * v for w, v in zip(weights, y, strict=True)) / total
    spread = sum(w * (u - mean_x) ** 2 for w, u in zip(weights, x, strict=True))
    both = sum(w * (u - mean_x) * (v - mean_y) for w, u, v in zip(weights, x, y, strict=True))
    slope = both / spread
    intercept = mean_y - slope * mean_x
    if slope < 0:
        return mean_y, 0.0
    if intercept < 0:
        square = sum(w * u * u for w, u in zip(weights, x, strict=True))
        return 0.0, sum(w * u * v for w, u, v in zip(weights, x, y, strict=True)) / square
    return intercept, slope


def fit_lines(found: Iterable[Sample]) -> list[Line]:
    """A line for each operation and scope of which two sizes or more were measured rightly."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for one in found:
        if one.correct:
            groups.setdefault((one.operation, one.scope), []).append(one)
    return [fit_line(g) for g in groups.values() if len({s.bytes for s in g}) > 1]


# --- the files -------------------------------------------------------------------------------


def to_csv(found: Iterable[Sample]) -> str:
    """The content of comm.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(s) | {"correct": str(s.correct).lower()} for s in found)
    return text.getvalue()


def read_csv(path: Path) -> list[Sample]:
    """The samples of a comm.csv; raises UsageError for a file that is none."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
        return [_sample_of(row) for row in rows]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        raise UsageError(f"{path} is no comm.csv of `python -m jobkit comm`") from None


def _sample_of(row: Mapping[str, str]) -> Sample:
    kinds = {f.name: f.type for f in fields(Sample)}
    values: dict[str, Any] = {k: row[k] for k in COLUMNS if k != "pipelined_time_s"}
    pipelined = row["pipelined_time_s"]  # empty on the CPU
    values["pipelined_time_s"] = float(pipelined) if pipelined else None
    values["correct"] = {"true": True, "false": False}[row["correct"]]
    for name, kind in kinds.items():
        if kind in (int, float):
            values[name] = kind(row[name])
    return Sample(**values)


def to_json(about: Mapping[str, Any], lines: Iterable[Line]) -> dict[str, Any]:
    """The content of comm.json; about: where it was measured, as run_start says it."""
    return {"v": 1, "kind": "comm", **about, "lines": [asdict(line) for line in lines]}


def read_lines(path: Path) -> list[Line]:
    """The fitted lines of a comm.json; raises UsageError for a file that is none or has none."""
    if not path.is_file():
        raise UsageError(f"no file {path}: `python -m jobkit comm` writes a comm.json")
    try:
        lines = [Line(**line) for line in (read_json(path, follow=True) or {})["lines"]]
        numbers = [v for one in lines for v in (one.latency_s, one.s_per_byte)]
        fine = all(type(v) in (int, float) and v >= 0 for v in numbers)
    except (KeyError, TypeError):
        fine, lines = False, []
    if not fine or not lines:
        raise UsageError(f"{path} is no comm.json of `python -m jobkit comm` with fitted lines")
    return lines
