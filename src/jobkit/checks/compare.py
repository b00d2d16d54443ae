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
from jobkit.payload.checkpoint import Corrupt, check, found_in


def newest_tensors(run: Path) -> dict[str, Tensor]:
    """Parameters and optimizer state of a run's newest checkpoint, by name. Raises Corrupt."""
    checkpoints = found_in(RunPaths(run).checkpoints)
    if not checkpoints:
        raise Corrupt(f"{run} has no checkpoint")
    checkpoint = check(checkpoints[0])
    tensors = checkpoint.blank("model.", "optim.")
    checkpoint.read(tensors)
    return tensors


def differing(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that either lacks, or that differ in type, shape or any bit."""
    names = []
    for name in sorted(first.keys() | other.keys()):
        pair = [tensors.get(name, torch.empty(0)) for tensors in (first, other)]
        kinds = {(t.dtype, t.shape) for t in pair}
        # As bytes: so NaN equals NaN, and 0.0 is not -0.0.
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in pair]
        if len(kinds) > 1 or not torch.equal(*bits):
            names.append(name)
    return names


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compare the runs with the first one; return the exit code."""
    parser = Parser(prog="python -m jobkit.checks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path, metavar="REF", help="folder of the reference run")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    args, code = parser.parse_args(argv), Exit.OK
    try:
        expected = newest_tensors(args.reference)
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
