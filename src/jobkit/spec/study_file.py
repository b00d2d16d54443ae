"""What stands in a study's file: its TOML, and its sizes."""

import re
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.files import MOST_TOML, load_toml, read_text


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UsageError for a file that cannot be read."""
    try:
        return load_toml(read_text(path, MOST_TOML))
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def size_of(gpus: int | str, per_node: int | None) -> tuple[int, int]:
    """A size as (nodes, ranks per node): 8 on nodes of 4 is (2, 4); "2x3" is (2, 3)."""
    if isinstance(gpus, str) and (match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", gpus)):
        return int(match[1]), int(match[2])
    if isinstance(gpus, str) and re.fullmatch(r"[1-9]\d{0,6}", gpus):
        gpus = int(gpus)
    if type(gpus) is not int or gpus < 1:
        hint = ""
        if isinstance(gpus, str) and re.fullmatch(r"\d+(,\d+)+,?", gpus):
            hint = f"; separate sizes by spaces: --gpus {' '.join(filter(None, gpus.split(',')))}"
        elif isinstance(gpus, str) and re.match(r"[A-Za-z./]", gpus):
            hint = "; a command comes after --, as: --gpus 1 2 -- python train.py"
        raise UsageError(
            f"gpus {gpus!r}: must be a whole number, 1 or more, or NODESxRANKS as 2x4{hint}"
        )
    if per_node is None or gpus <= per_node:
        return 1, gpus
    if gpus % per_node:
        raise UsageError(f"gpus {gpus}: does not fill nodes of {per_node}; say NODESxRANKS, as 2x3")
    return gpus // per_node, per_node
