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
    found = found_in(RunPaths(run).checkpoints)
    if not found:
        raise Corrupt(f"{run} has no checkpoint")
    _, index = check(found[0])
    tensors = {
        name: torch.empty(size, dtype=dtype)
        for name, (size, dtype) in shapes_in(index).items()
        if name.startswith(_PARTS)
    }
    read(found[0], index, tensors)
    return tensors


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that one of both lacks, or that differ in any bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not _same_bits(one[name], other[name])
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # As bytes: so NaN equals NaN, and 0.0 is not -0.0.
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="python -m jobkit.checks.compare", description=__doc__.splitlines()[0])
    made.add_argument("reference", type=Path, metavar="REF", help="folder of the reference run")
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    return made


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compare the runs with the first one; return the exit code."""
    args = parser().parse_args(argv)
    try:
        expected, code = newest_tensors(args.reference), Exit.OK
    except Corrupt as fault:
        raise UsageError(f"the reference: {fault}") from None
    for run in args.runs:
        said: dict[str, object] = {"run": str(run), "same": None, "differing": [], "fault": ""}
        try:
            names = differing(expected, newest_tensors(run))
            said |= {"same": not names, "differing": names}
        except Corrupt as fault:
            said["fault"] = str(fault)
        code = code if said["same"] else Exit.THRESHOLD
        print(json.dumps(said), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(None))
