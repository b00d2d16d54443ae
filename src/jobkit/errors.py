"""Errors of the user: one line, and a documented exit code."""

import argparse
import difflib
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NoReturn


class Exit(IntEnum):
    """The exit codes of every command of jobkit."""

    OK = 0
    FAILED = 1  # the run failed
    USAGE = 2  # wrong usage or bad input; nothing was written
    INCOMPLETE = 3  # collected, but a run is not ok; or not all runs were submitted
    THRESHOLD = 4  # a threshold was not met
    PREFLIGHT = 5  # a check of the preflight failed
    AGAIN = 75  # stopped early with a checkpoint: run again to resume
    INTERRUPTED = 130
    TERMINATED = 143


ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Control characters, ends of lines of any kind, characters that turn the direction of a text, and
# halves of characters, which no file takes.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+"
)
_MAX_ERROR, _MAX_WORD = 4000, 100  # characters
_UNKNOWN = "unrecognized arguments: "  # how argparse begins that message


def one_line(text: str) -> str:
    """A text as one line that any terminal and file takes: no colours, no control characters."""
    return _CONTROL.sub(" ", ANSI.sub("", text)).strip()


def has_control(text: str, multiline: bool = False) -> bool:
    """Whether a text has control characters; multiline: beside tabs and newlines."""
    return bool(_CONTROL.search(re.sub(r"[\t\n]", "", text) if multiline else text))


class UsageError(ValueError):
    """Bad input from the user; the text is the one line that they see."""

    code = Exit.USAGE  # of the command that it ends

    def __str__(self) -> str:
        """The text as one plain line: parts of it come from files that others may have written."""
        text = one_line(super().__str__())
        return text if len(text) <= _MAX_ERROR else text[: _MAX_ERROR - 4] + " ..."


class NotStarted(UsageError):
    """The input may be right, and the run could not start: another try may."""

    code = Exit.FAILED


class RanksDiffer(RuntimeError):
    """Ranks that must hold the same parameters do not: the run ends with Exit.THRESHOLD."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, with one line per error, and with epilogs kept verbatim."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with 2."""
        hint = self._hint(message.removeprefix(_UNKNOWN)) if message.startswith(_UNKNOWN) else ""
        see = f"(see {self.prog} --help)"
        self.exit(Exit.USAGE, f"{self.prog}: error: {one_line(message)}{hint} {see}\n")

    def _hint(self, words: str) -> str:
        """What may have been meant by words that the parser does not know."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        unknown = next((w.partition("=")[0] for w in words.split() if w.startswith("--")), "")
        if not unknown:
            return "; write a command after --, as: -- python train.py"
        longer = [name for name in known if len(unknown) > 4 and unknown[2:] in name]
        if difflib.get_close_matches(unknown, known, 1, cutoff=0.85) or not longer:
            return nearest(unknown, known)
        return f"; did you mean {' or '.join(longer[:3])}?"


def command(main: Callable[..., int]) -> Callable[..., int]:
    """The main function of a command: a UsageError becomes one line and its exit code, 2."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except UsageError as error:
            print(f"jobkit: error: {error}", file=sys.stderr, flush=True)
            return error.code

    return run


def at_least(
    kind: type[int] | type[float], low: float, high: float = 10**15, *, over: bool = False
) -> Callable[[str], Any]:
    """A type for argparse: a number from low to high, a whole one also as 7e9; over: above low."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (over and value == low) or (kind is int and value % 1):
            what = "a whole number" if kind is int else "a number"
            bound = f" over {low:g}" if over else f", {low:g} or more"
            most = f", at most {high:g}" if high < 10**15 else ""
            hint = "; separate numbers by spaces" * bool(re.fullmatch(r"\d+(,\d+)+", text))
            raise argparse.ArgumentTypeError(f"'{text}': must be {what}{bound}{most}{hint}")
        return kind(value)

    return convert


whole = functools.partial(at_least, int)
positive = at_least(float, 0, over=True)
share = at_least(float, 0, 1, over=True)


def read_bytes(text: str) -> int:
    """A type for argparse: a size such as 4096, 4K, 16MiB or 1G (powers of two)."""
    parts = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if not parts:
        raise argparse.ArgumentTypeError(f"'{text}': must be a size, as 4096, 4K or 1GiB")
    return int(parts[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[parts[2]]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest of the known words, or an empty string."""
    if len(word) > _MAX_WORD:  # compared letter by letter
        return ""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def one_of(what: str, word: object, known: Iterable[str]) -> None:
    """Check that a word is one of the known ones; raise UsageError that lists them otherwise."""
    words = list(known)
    if word not in words:
        hint = nearest(str(word), words)
        raise UsageError(f"unknown {what} '{word}'{hint or ''} (known: {', '.join(words)})")
