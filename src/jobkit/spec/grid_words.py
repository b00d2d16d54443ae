"""--sweep NAME=V1,V2 and --parameter NAME=VALUE of a command line, put into a study."""

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jobkit.errors import UsageError, nearest
from jobkit.spec.placeholders import Value, used
from jobkit.spec.plan import Study
from jobkit.spec.runspec import check_keys, check_value, overridden, plain_type

_BOOLS = {"true": True, "false": False}


def add_grid_arguments(made: argparse.ArgumentParser) -> None:
    """Add --sweep and --parameter."""
    group = made.add_argument_group("grid", "Both take several words, and may be repeated.")
    group.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=V1,V2",
        help="one run for each value of a setting, or of a placeholder {NAME} of the command",
    )
    group.add_argument(
        "--parameter",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="value of a placeholder {NAME} of the command, and a column of results.csv",
    )


def with_words(
    study: Study, sweeps: Sequence[str], parameters: Sequence[str], given: Collection[str] = ()
) -> Study:
    """The study with what NAME=V1,V2 (sweeps) and NAME=VALUE (parameters) say, as last word.

    given: settings that have an option of their own on the same command line, which must not be
    swept as well. Raises UsageError for a text that is no assignment, a name that the study does
    not know, a value that its setting does not take, and whatever is said twice.
    """
    if not (sweeps or parameters):
        return study
    swept = _assignments("--sweep", sweeps, "V1,V2")
    single = _assignments("--parameter", parameters, "VALUE")
    if not study.command:
        return _with_settings(study, swept, single, given)
    for name in single:
        if name in swept:
            raise UsageError(f"{name}: give --parameter or --sweep, not both")
    _check_names(study, [*swept, *single], [*swept.values(), *single.values()])
    kept = {k: v for k, v in study.sweep.items() if k not in single}
    more = {k: _values(k, text, _plain) for k, text in swept.items()}
    own = {**study.parameters, **{k: _plain(k, text) for k, text in single.items()}}
    return replace(study, parameters=own, sweep={**kept, **more})


def _with_settings(
    study: Study, swept: Mapping[str, str], single: Mapping[str, str], given: Collection[str]
) -> Study:
    """A study of jobkit's own training, whose sweeps are of its settings."""
    if single:
        name = next(iter(single))
        raise UsageError(
            f"--parameter {name}: is of a command; a setting of the training has its own option"
        )
    sweep: dict[str, Any] = {}
    for word, text in swept.items():
        name = word.replace("-", "_")
        check_keys({name: text})
        if name in sweep:
            raise UsageError(f"--sweep {name}: given twice, also as {word}")
        if name in given:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{name}: give {option} or --sweep, not both")
        sweep[name] = _values(name, text, _setting)
    fixed = {k: v for k, v in overridden(study.settings, sweep).items() if k not in sweep}
    fixed |= {k: v for k, v in study.settings.items() if k in given}
    return replace(study, settings=fixed, sweep=overridden(study.sweep, sweep))


def _assignments(option: str, words: Sequence[str], what: str) -> dict[str, str]:
    """The words NAME=TEXT, by name."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise UsageError(f"{option} {word!r}: must be NAME={what}")
        if name in found:
            raise UsageError(f"{option} {name}: given twice")
        found[name] = text
    return found


def _values(name: str, text: str, typed: Any) -> tuple[Value, ...]:
    """The values between the commas, each once."""
    found: list[Value] = []
    for part in text.split(","):
        if not part.strip():
            raise UsageError(f"--sweep {name}={text}: has an empty value")
        value = typed(name, part.strip())
        if value in found:
            raise UsageError(f"--sweep {name}={text}: has {part.strip()} twice")
        found.append(value)
    return tuple(found)


def _plain(_name: str, text: str) -> Value:
    """A value as TOML has it: a number, true or false, else a string."""
    if text in _BOOLS:
        return _BOOLS[text]
    if re.fullmatch(r"[+-]?\d{1,15}", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d{1,15}(\.\d+)?([eE][+-]?\d{1,2})?", text):
        return float(text)
    return text


def _setting(name: str, text: str) -> Value:
    """A value of a setting. Raises UsageError that says what it may be."""
    plain, _ = plain_type(name)
    try:
        value: Any = _BOOLS[text] if plain is bool else plain(text)
    except (KeyError, ValueError):
        value = text  # its check says what it must be
    checked: Value = check_value(name, value)
    return checked


def _check_names(study: Study, names: Sequence[str], texts: Sequence[str]) -> None:
    """Raise UsageError for a name without a placeholder: its values would change nothing."""
    places = [*study.command, *study.parameters.values(), *texts, study.work.get("per_step")]
    known = set[str]().union(study.parameters, study.sweep, *map(used, places))
    for name in names:
        if name not in known:
            raise UsageError(
                f"parameter {name}: no {{{name}}} in the command{nearest(name, known)}"
            )
