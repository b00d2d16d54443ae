"""Whether runs have ended with the same parameters: `python -m jobkit.checks.compare REF RUN ...`

Compares the newest checkpoints of runs' folders bit by bit: parameters (model.*) and the
optimizer's state (optim.*). Prints one line of JSON for each RUN: run, same (null where it
cannot be told).
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

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


def are_same(first: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors, of the same type, shape and bits."""

    def same(a: Tensor, b: Tensor) -> bool:
        # As bytes: so NaN equals NaN, and 0.0 is not -0.0.
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)

    return first.keys() == other.keys() and all(same(t, other[name]) for name, t in first.items())


def main(argv: Sequence[str]) -> None:
    """Compare the runs with the first one."""
    reference, *runs = map(Path, argv)
    expected = newest_tensors(reference)
    for run in runs:
        try:
            same = are_same(expected, newest_tensors(run))
        except Corrupt:
            same = None
        print(json.dumps({"run": str(run), "same": same}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
