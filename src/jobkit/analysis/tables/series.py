"""The series of each run: runs with the same settings except size and repeat."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jobkit.spec.planned import PlannedRun

# Values that need no name; others are shown as setting=value.
_PLAIN_VALUES = ("strategy", "model", "precision", "optimizer", "scaling")


def series_labels(specs: Mapping[str, PlannedRun | None]) -> dict[str, str]:
    """A label for each run: its strategy and every setting in which the runs differ.

    Runs with the same label differ in size and repeat only. Strong and weak scaling never share
    a label. A run whose settings are not known gets one of its own.
    """
    keys = {run_id: spec.comparable() for run_id, spec in _decided(specs).items()}
    said = {run_id: repr(key) for run_id, key in keys.items()}
    each = {said[run_id]: key for run_id, key in keys.items()}  # of thousands of runs a few differ
    varying = [
        name
        for name in _names(each.values())
        if len({repr(k.get(name)) for k in each.values()}) > 1
    ]
    shown = ["strategy", *(name for name in varying if name != "strategy")]
    labels = {text: ", ".join(_say(key, shown)) for text, key in each.items()}
    return {
        run_id: labels[said[run_id]] if run_id in said else f"{run_id} (settings unknown)"
        for run_id in specs
    }


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
        if name in _PLAIN_VALUES:
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(f"{name}={'default' if value is None else value}")
    return words
