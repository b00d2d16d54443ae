"""The settings of RunSpec as options of a command line."""

import argparse
from dataclasses import fields
from typing import Any

from jobkit.errors import UsageError
from jobkit.spec.runspec import SETTINGS, RunSpec, check_value, describe, plain_type


def _flag_type(name: str) -> Any:
    """A converter for argparse that says what the setting may be."""
    plain, _ = plain_type(name)

    def convert(text: str) -> Any:
        try:
            return check_value(name, plain(text))
        except ValueError as error:
            reason = str(error) if isinstance(error, UsageError) else f"must be {describe(name)}"
            raise argparse.ArgumentTypeError(reason) from None

    return convert


def add_spec_arguments(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """Add one option for each setting that the payload takes, absent when not given."""
    group = parser.add_argument_group("settings of the training")
    for f in fields(RunSpec):
        if not f.metadata["option"] or f.name in skip:
            continue
        flag, text = "--" + f.name.replace("_", "-"), f.metadata["help"].replace("%", "%%")
        kwargs: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
        if f.default is not None:
            text += f" (default {f.default})"
        if plain_type(f.name)[0] is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            metavar = "|".join(f.metadata["choices"]) if f.metadata["choices"] else None
            plain = plain_type(f.name)[0]
            kwargs |= {"type": _flag_type(f.name)}
            kwargs["metavar"] = metavar or {int: "N", float: "X", str: "TEXT"}[plain]
        group.add_argument(flag, help=text, **kwargs)


def given_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """The settings that stand in a parsed namespace: only those that the user gave."""
    return {k: v for k, v in vars(namespace).items() if k in SETTINGS}
