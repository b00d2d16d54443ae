"""The parser of a command line with --sbatch OPTION."""

import sys
from collections.abc import Sequence
from typing import Any

from jobkit.errors import Parser


class SbatchParser(Parser):
    """Takes a value of --sbatch that begins with -, which argparse has for an option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(_whole_options(words), namespace)


def _whole_options(words: Sequence[str]) -> list[str]:
    """The words, with --sbatch and its value as one."""
    found: list[str] = []
    for word in words:
        joins = bool(found) and found[-1] == "--sbatch"
        found[-1:] = [f"--sbatch={word}"] if joins else [*found[-1:], word]
    return found
