"""Whether runs have ended with the same parameters: `python -m jobkit.checks.compare REF RUN ...`

Compares the newest checkpoints of runs' folders bit by bit: parameters (model.*) and the
optimizer's state (optim.*). Prints one line of JSON for each RUN: run, same (null where it
cannot be told), differing (names of tensors), fault (why it cannot be told). Ends with 4 where one
differs or cannot be told.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from jobkit.errors import Exit, Parser, UsageError, command
from jobkit.paths import RunPaths
from jobkit.payload.checkpoint import Corrupt, check, found_in, read, shapes_in

_PARTS = ("model.", "optim.")


def newest_tensors(run: Path) -> dict[str, Tensor]:
    """Parameters and optimizer state of a run's newest checkpoint, by name. Raises Corrupt."""
    checkpoints = found_in(RunPaths(run).checkpoints)
    if not checkpoints:
        raise Corrupt(f"{run} has no checkpoint")
    _, index = check(checkpoints[0])
    tensors = {
        name: torch.empty(size, dtype=dtype)
        for name, (size, dtype) in shapes_in(index).items()
        if name.startswith(_PARTS)
    }
    read(checkpoints[0], index, tensors)
    return tensors


def differing(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that either lacks, or that differ in any bit."""
    return [
        name
        for name in sorted(first.keys() | other.keys())
        if name not in first or name not in other or not _same_bits(first[name], other[name])
    ]


def _same_bits(first: Tensor, other: Tensor) -> bool:
    if (first.dtype, first.shape) != (other.dtype, other.shape):
        return False
    # As bytes: so NaN equals NaN, and 0.0 is not -0.0.
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (first, other)))


def parser() -> Parser:
    """The command line."""
    options = Parser(prog="python -m jobkit.checks.compare", description=__doc__.splitlines()[0])
    options.add_argument("reference", type=Path, metavar="REF", help="folder of the reference run")
    options.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    return options


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compare the runs with the first one; return the exit code."""
    args = parser().parse_args(argv)
    try:
        expected, code = newest_tensors(args.reference), Exit.OK
    except Corrupt as fault:
        raise UsageError(f"the reference: {fault}") from None
    for run in args.runs:
        row: dict[str, object] = {"run": str(run), "same": None, "differing": [], "fault": ""}
        try:
            names = differing(expected, newest_tensors(run))
            row |= {"same": not names, "differing": names}
        except Corrupt as fault:
            row["fault"] = str(fault)
        code = code if row["same"] else Exit.THRESHOLD
        print(json.dumps(row), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(None))
