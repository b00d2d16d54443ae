"""How the final validation loss and accuracy change from the smallest to the largest size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from jobkit.analysis.collect.results import Results
from jobkit.analysis.scaling.sizes import Size
from jobkit.analysis.scaling.spread import CONFIDENCE
from jobkit.analysis.scaling.welch import Welch, holm, welch
from jobkit.analysis.tables.frames import Row, plain_records
from jobkit.analysis.tables.text import counted_ranks, say_accuracy

_MANY = 5  # series of which each has a sentence
_LOSS, _ACCURACY = "val_loss", "val_accuracy"  # of results.csv
_WORDS = {_LOSS: "the loss", _ACCURACY: "the accuracy"}
Values = Sequence[float]


@dataclass(frozen=True)
class _Change:
    """One measure of one series at two sizes, every repeat. Losses are compared as logarithms."""

    name: str
    small: Values
    large: Values

    @property
    def text(self) -> str:
        """Both medians in words."""
        low, high = median(self.small), median(self.large)
        if self.name == _LOSS:
            return f"final validation loss {low:.4g} and {high:.4g}"
        return f"accuracy {say_accuracy(low)} and {say_accuracy(high)}"

    def test(self) -> Welch | None:
        """The test of the difference; None where no repeat says what chance does."""
        if min(len(self.small), len(self.large)) < 2 or self.repeats_alike():
            return None
        if self.name == _LOSS:
            return welch([math.log(v) for v in self.large], [math.log(v) for v in self.small])
        return welch(self.large, self.small)

    def repeats_alike(self) -> bool:
        """Whether all repeats of a size gave the same value, as those of one seed may."""
        each = (self.small, self.large)
        return min(map(len, each)) > 1 and all(len(set(values)) == 1 for values in each)

    def interval(self, test: Welch) -> str:
        """The difference of the means (of a loss: the ratio) with its interval."""
        ends = (test.difference, *test.interval)
        of = ""
        if self.name == _LOSS:
            said = [f"{math.expm1(end):+.1%}" for end in ends]
        elif max(*self.small, *self.large) > 1:  # no share
            said = [f"{end:+.3g}" for end in ends]
        else:
            said, of = [f"{100 * end:+.1f}" for end in ends], " points"
        return f"{said[0]}{of} [{CONFIDENCE:.0%}: {said[1]} to {said[2]}]"


def learned(results: Results, unit: str) -> list[str]:
    """A sentence for each series that was measured at several sizes; empty without a validation.

    Compared are the smallest and the largest size, by Welch's test, corrected by Holm's method for
    all tests. Sizes whose runs were of another number of epochs are not compared.
    """
    names = list(dict.fromkeys(s.series for s in results.sizes if not s.note))
    pairs = [pair for name in names if (pair := _ends(results, name))]
    used = plain_records(results.runs[["run_id", "epochs_done", _LOSS, _ACCURACY]])
    rows = {row["run_id"]: row for row in used}
    found = [(*pair, changes) for pair in pairs if (changes := _changes(rows, *pair))]
    tests = [[change.test() for change in changes] for *_, changes in found]
    corrected = iter(holm([test.p_value() for each in tests for test in each if test]))
    said = [
        _sentence(small, large, changes, each, [next(corrected) for test in each if test], unit)
        for (small, large, changes), each in zip(found, tests, strict=True)
    ]
    if len(said) <= _MANY:
        return said
    return [*said[:_MANY], f"Validation of the other {len(said) - _MANY} series: see the figures."]


def _ends(results: Results, series: str) -> tuple[Size, Size] | None:
    """The smallest and the largest size of a series with runs that are ok, if these are two."""
    found = [s for s in results.sizes if s.series == series and s.ok_runs and s.world_size]
    if not found or found[0].world_size == found[-1].world_size:
        return None
    return found[0], found[-1]


def _changes(rows: Mapping[str, Row], small: Size, large: Size) -> list[_Change]:
    """Loss and accuracy of two sizes, as far as both have them after as many epochs."""
    of_small, of_large = ([rows[run_id] for run_id in s.ok_runs] for s in (small, large))
    if len({row["epochs_done"] for row in (*of_small, *of_large)} - {None}) > 1:
        return []
    made = []
    for name in (_LOSS, _ACCURACY):
        low, high = (
            [float(row[name]) for row in own if row[name] is not None]
            for own in (of_small, of_large)
        )
        if low and high and (name != _LOSS or min(*low, *high) > 0):
            made.append(_Change(name, low, high))
    return made


def _sentence(
    small: Size,
    large: Size,
    changes: Sequence[_Change],
    tests: Sequence[Welch | None],
    p_values: Sequence[float],
    unit: str,
) -> str:
    """Medians at both sizes, their differences with intervals, and whether these are chance."""
    parts = [
        f"{one.text}, {one.interval(test)}" if test else one.text
        for one, test in zip(changes, tests, strict=True)
    ]
    batch = ""
    if small.global_batch_size != large.global_batch_size:
        batch = f" (global batch {small.global_batch_size} and {large.global_batch_size})"
    head = f"{small.series} on {_where(small, unit)} and on {_where(large, unit)}{batch}: "
    return f"{head}{'; '.join(parts)}. {_judged(changes, tests, p_values)}"


def _judged(
    changes: Sequence[_Change], tests: Sequence[Welch | None], p_values: Sequence[float]
) -> str:
    """What the tests of a series say; why there are none."""
    if not p_values:
        if any(one.repeats_alike() for one in changes):
            return "The repeats of a size are equal, so they do not show what chance does."
        return "Without repeats at both sizes a difference may be chance."
    tested = [_WORDS[one.name] for one, test in zip(changes, tests, strict=True) if test]
    alike = [_WORDS[one.name] for one in changes if one.repeats_alike()]
    more = f" The repeats of {alike[0]} are equal: it was not tested." if alike else ""
    sure = [name for name, p in zip(tested, p_values, strict=True) if p < 1 - CONFIDENCE]
    if not sure:
        text = f"No difference of {' or '.join(tested)} is beyond the spread of the repeats"
        return f"{text} (p = {min(p_values):.2g}).{more}"
    verb = "differs" if len(sure) == 1 else "differ"
    said = " and ".join(sure)
    return f"{said[0].upper()}{said[1:]} {verb} by more than the repeats vary.{more}"


def _where(size: Size, unit: str) -> str:
    on = f" of {size.nodes} nodes" if (size.nodes or 1) > 1 else ""
    return f"{counted_ranks(size.world_size or 0, unit)}{on}"
