"""The [METRIC] lines of a run that no table has, so that none is dropped in silence."""

from collections.abc import Mapping
from typing import Any

from jobkit.analysis.collect.lines import METRIC_LINES, observes
from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import Observed
from jobkit.analysis.tables.text import counted
from jobkit.metric.kinds import KINDS, Record

_MOST_NAMES = 5  # that are shown of a run
_NOT_SHOWN = frozenset(("rank", "attempt", "step", "epoch", "t", "seq"))


def unused_lines(records: RunRecords, observed: Observed | None) -> str:
    """How many lines are in no table and what they name; empty where there are none.

    Those are numbers of meter.value(), records of a kind that this version does not know, and
    key=value lines that say neither an epoch nor a time or rate, or whose steps were measured in a
    better way. Of a pattern, those that are not taken.
    """
    of_pattern = [*observed.others, *lines_not_taken(observed)] if observed else []
    return "; ".join(filter(None, [_in_no_table(records, observed), *of_pattern]))


def lines_not_taken(observed: Observed) -> list[str]:
    """How many lines of a pattern are not taken, or not wholly, and why: a sentence each."""
    said = []
    if observed.cut:
        said.append(
            f"{counted(observed.cut, 'line')} of {observed.source} may be truncated: not used"
        )
    if observed.unread:
        said.append(
            f"{counted(len(observed.unread), 'line')} of {observed.source} with a time or rate "
            f"that is no number above 0, as {observed.unread[0][:80]}: that value is not used"
        )
    if observed.repeated:
        said.append(
            f"{counted(observed.repeated, 'line')} of {observed.source} with the index of an "
            "earlier step, more than there are ranks: not used. Where the index begins again in "
            "each epoch, name the epoch's group epoch, or do not name the index step"
        )
    return said


def _in_no_table(records: RunRecords, observed: Observed | None) -> str:
    by_lines = observed is not None and observed.source == METRIC_LINES
    left = [r for r in records.records if _unused(r, by_lines)]
    if not left:
        return ""
    names = list(dict.fromkeys(name for record in left for name in _names(record)))
    shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    verb = "is" if len(left) == 1 else "are"
    return f"{counted(len(left), '[METRIC] line')} {verb} in no table ({shown})"


def _unused(record: Record, by_lines: bool) -> bool:
    if "v" in record:
        return record.get("kind") == "value" or record.get("kind") not in KINDS
    if type(record.get("epoch")) is int and "step" not in record:
        return False  # an epoch's, in epochs.csv or counted as not taken
    return not (by_lines and observes(record))


def _names(record: Mapping[str, Any]) -> list[str]:
    """What a line is about: the names of its numbers, or its kind."""
    if "v" in record:
        return [str(record.get("name") if record.get("kind") == "value" else record.get("kind"))]
    return [name for name in record if name not in _NOT_SHOWN] or list(record)
