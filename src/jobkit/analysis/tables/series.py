"""Series: runs with the same settings except size and repeat, and which must not be compared."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from jobkit.spec.command import COMMAND_LINE, PlannedRun

# Values that need no name; others are shown as setting=value.
_PLAIN_VALUES = ("strategy", "model", "precision", "optimizer", "scaling")
_MAX_LENGTH = 200  # characters of a label
# Only where these are the same does a curve show the effect of the size.
SAME = ("model", "dataset", "precision", "fp32", "device_type", "torch_version", "throughput_unit")
COPIES = "{} copies: nothing shows that the ranks worked together (no process group, connection or "
COPIES += "shared memory); give it DDP or its own launcher (--launcher once), or state --together"
IN_STEPS = "steps/s"  # the unit of a rate whose work is not known
UNKNOWN_WORK = f"{IN_STEPS} do not say whether a step's work grows with the ranks: "
UNKNOWN_WORK += "state --scaling weak or strong"
OTHER_WORK = 1.5  # times the work of a step: not what was stated
_BATCH = {"strong": "global_batch_size", "weak": "batch_size_per_rank"}


def series_labels(specs: Mapping[str, PlannedRun | None]) -> dict[str, str]:
    """A label for each run: its strategy and every setting in which the runs of its kind differ.

    Kinds are trainings and commands. Runs with the same label differ in size and repeat only; a
    command with other words is another series. Strong and weak scaling never share a label. A run
    whose settings are not known gets one of its own.
    """
    keys = {run_id: spec.comparable() for run_id, spec in specs.items() if spec}
    texts = {run_id: repr(key) for run_id, key in keys.items()}
    different = {texts[run_id]: key for run_id, key in keys.items()}
    labels, taken = dict[str, str](), Counter[str]()
    for is_command in (False, True):
        alike = {k: key for k, key in different.items() if (COMMAND_LINE in key) is is_command}
        names = dict.fromkeys(name for key in alike.values() for name in key)
        varying = [n for n in names if len({repr(k.get(n)) for k in alike.values()}) > 1]
        shown = dict.fromkeys(name for name in ("strategy", *varying) if name != COMMAND_LINE)
        commands = [key[COMMAND_LINE] for key in alike.values() if is_command]
        for text in sorted(alike):
            words = _words(alike[text], shown)
            words += _differing(alike[text][COMMAND_LINE], commands) if is_command else []
            label = ", ".join(words)
            if len(label) > _MAX_LENGTH:  # what differs is often at the end
                label = f"{label[: _MAX_LENGTH // 2]} ... {label[-_MAX_LENGTH // 2 :]}"
            taken[label] += 1
            labels[text] = label if taken[label] == 1 else f"{label} (variant {taken[label]})"
    return {
        run_id: labels[texts[run_id]] if run_id in texts else f"{run_id} (settings unknown)"
        for run_id in specs
    }


def _words(key: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The words of a label. The other kind of scaling has another batch: a key may lack a name."""
    words = []
    for name, value in ((name, key[name]) for name in names if name in key):
        if name in _PLAIN_VALUES:
            words += [] if value is None else [str(value)]
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name}={'default' if value is None else value}")
    return words


def _differing(command: Sequence[str], commands: Sequence[Sequence[str]]) -> list[str]:
    """What not all commands say, in one text: each word after the option that it is of."""
    words = []
    aligned = len({*map(len, commands)}) == 1
    for i, word in enumerate(command):
        if not all(other[i] == word if aligned else word in other for other in commands):
            option = command[i - 1] if i else ""
            words += [option] * (option.startswith("-") and option not in words) + [word]
    return [" ".join(" ".join(words).split())] if words else []


def faults(runs: pd.DataFrame) -> dict[str, str]:
    """The series whose runs must not be compared with each other, and the reason.

    It is the first column that must be the same and is not, with its values.
    """
    reasons: dict[str, str] = {}
    for series, group in runs[runs["status"] == "ok"].groupby("series"):
        batch = [_BATCH[s] for s in group["scaling"].dropna().unique() if s in _BATCH]
        for name in reversed(("strategy", "scaling", *SAME, "train_samples", *batch)):
            values = group[name].dropna().unique()
            if len(values) > 1:
                reasons[str(series)] = f"{name} differs ({', '.join(sorted(map(str, values)))})"
        in_steps = {*group["throughput_unit"].dropna()} == {IN_STEPS}
        if in_steps and group["scaling"].isna().all() and group["world_size"].nunique() > 1:
            reasons[str(series)] = UNKNOWN_WORK
        copies = group.loc[group["ranks_together"] == "none", "world_size"]
        if not copies.empty:
            reasons[str(series)] = COPIES.format(int(copies.max()))
    return reasons


def odd_works(runs: pd.DataFrame) -> list[str]:
    """Series that say another work of a step, rate times time, than their scaling allows."""
    lines = []
    names = ["series", "scaling", "throughput_unit"]
    for (series, kind, _), group in runs[runs["status"] == "ok"].groupby(names):
        # Of jobkit's own training the batch is known.
        own = group[group[[*_BATCH.values()]].isna().all(axis=1)]
        said = own[["throughput", "step_time_s", "world_size"]].dropna().itertuples(index=False)
        works = sorted((x * t / (n if kind == "weak" else 1), n) for x, t, n in said)
        if works and works[-1][0] > OTHER_WORK * works[0][0]:
            ends = " and ".join(f"{work:.4g} on {ranks}" for work, ranks in (works[0], works[-1]))
            what = "a rank in a step" if kind == "weak" else "a step"
            text = f"is the scaling really {kind}, or is the time that of a micro-step?"
            lines.append(f"{series}: the work of {what} is {ends} ranks: {text}")
    return lines
