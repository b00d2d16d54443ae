"""Settings of a training from options of a command line, a recipe, or a file (--spec)."""

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.files import read_text
from jobkit.paths import read_json
from jobkit.spec.runspec import SETTINGS, check_keys, check_value, describe, overridden, plain_type
from jobkit.spec.settings import GROUPS

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
    "lr_schedule": "triangular",
    "momentum": 0.85,
    "weight_decay": 0.00133,
    "bias_lr_factor": 64.0,
    "label_smoothing": 0.2,
    "lookahead_every": 5,
    "flip": "alternating",
    "crop_padding": 2,
    "tta": "flip_shift",
}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fast": _FAST,
    # The same for a few CPU cores: narrow, and a pass or two with smaller batches.
    "fast-cpu": {
        **_FAST,
        "width": 1,
        "epochs": 2,
        "global_batch_size": 128,
        "precision": "fp32",
        "label_smoothing": 0.1,
        "crop_padding": 0,
        "tta": "flip",
    },
}


_MOST_YAML = 64 << 10  # bytes: its reader is slow, and a file by hand is short


def read_spec_file(path: Path) -> dict[str, Any]:
    """The settings in a file. Raises UsageError for a file or a setting that cannot be used."""
    if path.suffix in (".yaml", ".yml"):
        found: Any = {k: _number(k, v) for k, v in _read_yaml(path).items()}
    else:
        content = read_json(path, follow=True)
        found = (content or {}).get("spec", content)
    if not isinstance(found, dict):
        raise UsageError(f"--spec {path}: not the spec.json of a run")
    settings: dict[str, Any] = found
    try:
        check_keys(settings)
    except UsageError as error:
        raise UsageError(f"--spec {path}: {error}") from None
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file and their values: no lists, no tables."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f'--spec {path}: needs PyYAML: run "python -m pip install pyyaml", or write JSON'
        ) from None
    try:
        found = yaml.safe_load(read_text(path, _MOST_YAML))
    except OSError as error:
        raise UsageError(f"--spec {path}: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"--spec {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"--spec {path}: must be lines such as 'epochs: 3'")
    for key, value in found.items():
        if isinstance(value, list | dict | set):
            raise UsageError(f"--spec {path}: {key}: must be one value, not a list or a table")
    return found


def _number(key: str, value: Any) -> Any:
    """A number that YAML 1.1 takes for text, as 1e-3, where the setting is one."""
    if isinstance(value, str) and key in SETTINGS and plain_type(key)[0] is float:
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _flag_type(name: str) -> Any:
    """A converter for argparse whose errors name the allowed values."""
    plain, _ = plain_type(name)

    def convert(text: str) -> Any:
        try:
            return check_value(name, plain(text))
        except ValueError as error:
            reason = str(error) if isinstance(error, UsageError) else f"must be {describe(name)}"
            raise argparse.ArgumentTypeError(reason) from None

    return convert


def add_spec_arguments(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """Add one option for each setting that the payload takes, in groups; absent when not given."""
    for title, settings in GROUPS.items():
        taken = [f for f in fields(settings) if f.metadata["option"] and f.name not in skip]
        if taken:
            group = parser.add_argument_group(title)
            for f in taken:
                _add_option(group, f)


def add_recipe_argument(parser: argparse.ArgumentParser) -> None:
    """Add --recipe, whose settings given_settings puts under the user's."""
    parser.add_argument(
        "--recipe",
        choices=sorted(RECIPES),
        help="defaults for a fast training, on a GPU or on a few CPU cores (docs/recipe.md)",
    )


def _add_option(group: Any, f: Field[Any]) -> None:
    """Add the option of one setting to a group of a parser."""
    text = f.metadata["help"].replace("%", "%%")
    kwargs: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
    if f.default is not None:
        text += f" (default {f.default})"
    plain, _ = plain_type(f.name)
    if plain is bool:
        kwargs["action"] = argparse.BooleanOptionalAction
    else:
        metavar = "|".join(f.metadata["choices"]) if f.metadata["choices"] else None
        kwargs |= {"type": _flag_type(f.name)}
        kwargs["metavar"] = metavar or {int: "N", float: "X", str: "TEXT"}[plain]
    group.add_argument("--" + f.name.replace("_", "-"), help=text, **kwargs)


def given_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings in a parsed namespace that the user gave, over those of --recipe."""
    given = {k: v for k, v in vars(namespace).items() if k in SETTINGS}
    recipe = getattr(namespace, "recipe", None)
    return overridden(RECIPES[recipe], given) if recipe else given
