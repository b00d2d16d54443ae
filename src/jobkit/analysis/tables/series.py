"""The series of each run: runs with the same settings except size and repeat."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jobkit.spec.runspec import COMMAND_LINE, PlannedRun

# Values that need no name; others are shown as setting=value.
_PLAIN_VALUES = ("strategy", "model", "precision", "optimizer", "scaling")
_LONGEST = 200  # characters of a label
_OPTION = re.compile(r"-(?![0-9.])")  # -1 and -.5 are values


def series_labels(specs: Mapping[str, PlannedRun | None]) -> dict[str, str]:
    """A label for each run: its strategy and every setting in which the runs differ.

    Runs with the same label differ in size and repeat only. Strong and weak scaling never share
    a label. A run whose settings are not known gets one of its own.
    """
    keys = {run_id: spec.comparable() for run_id, spec in _decided(specs).items()}
    said = {run_id: repr(key) for run_id, key in keys.items()}
    each = {said[run_id]: key for run_id, key in keys.items()}  # of thousands of runs a few differ
    each = _with_words(each)
    varying = [
        name
        for name in _names(each.values())
        if len({repr(k.get(name)) for k in each.values()}) > 1
    ]
    shown = ["strategy", *(name for name in varying if name != "strategy")]
    labels = _distinct({text: ", ".join(_say(key, shown)) for text, key in each.items()})
    return {
        run_id: labels[said[run_id]] if run_id in said else f"{run_id} (settings unknown)"
        for run_id in specs
    }


def _with_words(keys: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The keys; of a command only the words that not all of its program's commands have."""
    made, of_program = dict(keys), defaultdict[object, dict[str, list[tuple[str, ...]]]](dict)
    for text, key in keys.items():
        if COMMAND_LINE in key:
            of_program[key["strategy"]][text] = _parts(key[COMMAND_LINE])
    for commands in of_program.values():
        common = set.intersection(*map(set, commands.values()))
        for text, parts in commands.items():
            words = [word for part in parts if part not in common for word in part]
            made[text] = {**keys[text], COMMAND_LINE: " ".join(words)}
    return made


def _parts(command: Sequence[str]) -> list[tuple[str, ...]]:
    """The words of a command, a value together with the option before it."""
    parts: list[tuple[str, ...]] = []
    for word in command:
        of_option = parts and len(parts[-1]) == 1 and _OPTION.match(parts[-1][0])
        if of_option and not _OPTION.match(word):
            parts[-1] = (parts[-1][0], word)
        else:
            parts.append((word,))
    return parts


def _distinct(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels, shortened, with a number where several series would have the same."""
    made, taken = dict[str, str](), Counter[str]()
    for text in sorted(labels):
        label = labels[text] if len(labels[text]) <= _LONGEST else labels[text][:_LONGEST] + " ..."
        taken[label] += 1
        made[text] = label if taken[label] == 1 else f"{label} (variant {taken[label]})"
    return made


def _decided(specs: Mapping[str, PlannedRun | None]) -> dict[str, PlannedRun]:
    """The known specs. A run that has not begun will decide as the others did, if all did alike."""
    known = {run_id: spec for run_id, spec in specs.items() if spec}
    left = {name: auto for spec in known.values() for name, auto in spec.left_to_device.items()}
    for name, auto in left.items():
        own = {run_id: s for run_id, s in known.items() if name in s.left_to_device}
        values = {getattr(spec, name) for spec in own.values()} - {auto}
        if len(values) == 1:
            change: dict[str, Any] = {name: values.pop()}
            open_ones = {k: s for k, s in own.items() if getattr(s, name) == auto}
            known |= {run_id: replace(spec, **change) for run_id, spec in open_ones.items()}
    return known


def _names(keys: Any) -> list[str]:
    return list(dict.fromkeys(name for key in keys for name in key))


def _say(key: Mapping[str, Any], names: list[str]) -> list[str]:
    """The words of a label."""
    words = []
    for name in names:
        if name not in key:
            continue  # the other kind of scaling has this batch
        value = key[name]
        if name == COMMAND_LINE:
            words += [value.replace(";", ",")] if value else []  # ; divides series in tables
        elif name in _PLAIN_VALUES:
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name}={'default' if value is None else value}")
    return words
