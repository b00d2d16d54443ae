"""Exit codes of commands that are called in this process."""

from collections.abc import Callable, Sequence


def code_of(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """The exit code of a command; argparse ends it on wrong usage."""
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)
