"""The settings of RunSpec as options of a command line."""

import argparse
from dataclasses import Field, fields
from typing import Any

from jobkit.errors import UsageError
from jobkit.spec.groups import GROUPS
from jobkit.spec.recipes import RECIPES
from jobkit.spec.runspec import SETTINGS, check_value, describe, overridden, plain_type


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
