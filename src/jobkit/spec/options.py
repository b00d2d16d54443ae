"""Settings from options of a command line, a recipe, a file (--spec), or words (--sweep)."""

import argparse
import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.files import read_text
from jobkit.paths import read_json
from jobkit.spec.command import Value
from jobkit.spec.runspec import SETTINGS, TYPES, RunSpec, check_keys, overridden
from jobkit.spec.strategies import owners
from jobkit.spec.study import Study

_BOOLS = {"true": True, "false": False}

# By the ideas and with the hyperparameters of Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a
# Single GPU" (arXiv 2404.00498); its rate of 11.5 per 1024 x (1 + 1 / (1 - 0.85)) samples is 1.5
# for a mean over 1,024 samples.
_FAST: Mapping[str, Any] = {
    "model": "fast_cnn",
    "width": 4,
    "epochs": 10,
    "global_batch_size": 1024,
    "precision": "bf16",
    "lr": 1.5,
    "lr_scaling": "linear",
    "lr_base_batch_size": 1024,
    "momentum": 0.85,
    "weight_decay": 0.00133,
    "speed_run": True,
}
# The same for a few CPU cores: narrow, and a pass or two with smaller batches.
_FAST_CPU = {**_FAST, "width": 1, "epochs": 2, "global_batch_size": 128, "precision": "fp32"}
# Settings that belong together, as defaults under --recipe.
RECIPES: Mapping[str, Mapping[str, Any]] = {"fast": _FAST, "fast-cpu": _FAST_CPU}


def heading(field: Field[Any]) -> str:
    """The heading that a setting of RunSpec stands under; "": that of the one before it."""
    names = ", ".join(owners(field.name))
    return f"strategy {names}" if names else str(field.metadata["group"])


def add_spec_arguments(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """Add one option for each setting that the payload takes, in groups; absent when not given.

    RunSpec checks their values.
    """
    title, group = "", None
    for f in fields(RunSpec):
        if (new := heading(f) or title) != title:
            title, group = new, None
        if f.metadata["option"] and f.name not in skip:
            group = group or parser.add_argument_group(title)
            kind, choices = TYPES[f.name], f.metadata["choices"]
            kwargs: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            if kind is not bool:
                metavar = "|".join(choices or ()) or {int: "N", float: "X", str: "TEXT"}[kind]
                kwargs = {"metavar": metavar, "type": functools.partial(_setting, f.name)}
            default = "" if f.default is None else f" (default {f.default})"
            group.add_argument(
                "--" + f.name.replace("_", "-"), dest=f.name, default=argparse.SUPPRESS,
                help=f.metadata["help"].replace("%", "%%") + default, **kwargs,
            )  # fmt: skip


def add_recipe_argument(parser: argparse._ActionsContainer) -> None:
    """Add --recipe, whose settings chosen_settings puts under the user's."""
    parser.add_argument(
        "--recipe",
        choices=sorted(RECIPES),
        help="defaults for a fast training, on a GPU or on a few CPU cores (docs/recipe.md)",
    )


def chosen_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings in a parsed namespace that the user gave, over those of --recipe."""
    settings = {k: v for k, v in vars(namespace).items() if k in SETTINGS}
    recipe = getattr(namespace, "recipe", None)
    return overridden(RECIPES[recipe], settings) if recipe else settings


def read_spec_file(path: Path) -> dict[str, Any]:
    """The settings in the spec.json that a run left, or in flat YAML by hand, as `epochs: 3`.

    Raises UsageError for a file or a setting that cannot be used.
    """
    try:
        if path.suffix in (".yaml", ".yml"):
            table = _read_yaml(path)
        else:
            table = read_json(path, follow=True) or {}
            table = table.get("spec", table)
        if not table or not isinstance(table, dict):
            raise UsageError("not the spec.json of a run, or lines such as 'epochs: 3'")
        check_keys(table)
    except OSError as error:
        raise UsageError(f"--spec {path}: {error.strerror}") from None
    except UsageError as error:
        raise UsageError(f"--spec {path}: {error}") from None
    return table


def _read_yaml(path: Path) -> Any:
    """What a YAML file holds; YAML 1.1 takes 1e-3 for text."""
    try:
        import yaml

        table = yaml.safe_load(read_text(path))
    except ImportError:
        advice = 'run "python -m pip install pyyaml", or write JSON'
        raise UsageError(f"needs PyYAML: {advice}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"not valid YAML: {error}") from None
    if not isinstance(table, dict):
        return table
    words = {k: v for k, v in table.items() if isinstance(v, str) and k in SETTINGS}
    return table | {name: _setting(name, word) for name, word in words.items()}


def with_words(study: Study, words: Sequence[str]) -> Study:
    """The study with what the words NAME=V1,V2 of --sweep say, as last word.

    Raises UsageError for a text that is no assignment, and a name that the study does not know.
    """
    swept: dict[str, list[str]] = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name if study.command else name.replace("-", "_")
        if not (name and text):
            raise UsageError(f"--sweep {word!r}: must be NAME=V1,V2")
        swept[name] = [value.strip() for value in text.split(",")]
        if "" in swept[name]:
            raise UsageError(f"--sweep {name}={text}: has an empty value")
    if study.command:
        values = {name: tuple(map(_plain, v)) for name, v in swept.items()}
        return replace(study, sweep={**study.sweep, **values})
    check_keys(swept)
    sweep = {name: [_setting(name, word) for word in v] for name, v in swept.items()}
    fixed = {k: v for k, v in overridden(study.settings, sweep).items() if k not in sweep}
    return replace(study, settings=fixed, sweep=overridden(study.sweep, sweep))


def _plain(text: str) -> Value:
    """A value as TOML has it: a number, true or false, else a string."""
    if text in _BOOLS:
        return _BOOLS[text]
    if re.fullmatch(r"[+-]?\d{1,15}", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d{1,15}(\.\d+)?([eE][+-]?\d{1,2})?", text):
        return float(text)
    return text


def _setting(name: str, text: str) -> Value:
    """A word as the type of its setting where it has that form; RunSpec says what it must be."""
    with contextlib.suppress(KeyError, ValueError):
        value: Value = _BOOLS[text] if TYPES[name] is bool else TYPES[name](text)
        return value
    return text
