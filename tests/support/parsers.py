"""The parser of each command, as the command itself makes it, without running the command."""

import argparse
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from jobkit.__main__ import COMMANDS
from support.place import ROOT

RUN_SH = ("jobkit.payload.main", "main")
MINICLUSTER = ("minicluster.cli", "main")


# Options of run.sh itself, from the loop that reads them: those that it takes as --name=value (but
# the payload's, and the one for the jobs of a study), and those that are a branch of their own.
_SHELL = (ROOT / "run.sh").read_text()
VALUED_OF_RUN_SH = set(re.findall(r"(--[a-z-]+)=\*", _SHELL))
VALUED_OF_RUN_SH -= {"--check", "--stop-signal", "--site-file"}
OWN_OF_RUN_SH = VALUED_OF_RUN_SH | set(re.findall(r"^    (--[a-z-]+)\) ", _SHELL, re.MULTILINE))


class _MadeError(Exception):
    """Ends the command where it would read its arguments, with the parser that it made."""


@functools.cache
def parser_of(module: str, function: str) -> argparse.ArgumentParser:
    """The parser that a function hands its arguments to."""

    def caught(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _MadeError(parser)

    command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", caught):
        try:
            command([])
        except _MadeError as made:
            parser: argparse.ArgumentParser = made.args[0]
            return parser
    raise AssertionError(f"{module}.{function} reads no argument")


def of_command(name: str) -> argparse.ArgumentParser:
    """The parser of `python -m jobkit NAME`."""
    module, function, *_ = COMMANDS[name]
    return parser_of(module, function)


def options(parser: argparse.ArgumentParser) -> set[str]:
    """All options of a parser and of its subcommands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found |= options(each)
    return found
