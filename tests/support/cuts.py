"""What the tests of checkpoints share: small models, cut runs, and what a run left in the end."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from jobkit.payload import checkpoint as store
from support.rigs import NO_BREAKDOWN, Result

# 90 samples in batches of 16: the last batch of each epoch has 10, which ranks share unevenly.
SAMPLES, PER_EPOCH = 90, 6
DATA = ("--dataset", "synthetic", "--train-samples", str(SAMPLES), "--test-samples", "30")
# That profiled steps leave no trace is for test_measure.py.
RUN = (*DATA, "--epochs", "4", "--global-batch-size", "16", *NO_BREAKDOWN)
ITERATIONS = 4 * PER_EPOCH
MODELS = """
import json, os
from torch import nn
from jobkit.payload.batches import Batches

def noisy():
    '''Dropout draws random numbers, batch normalisation keeps statistics: both must go on.'''
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(8 * 15 * 15, 16), nn.ReLU(), nn.Linear(16, 10),
    )

# A note of the samples that this rank is given, step by step.
steps, told = [], Batches.epoch

def noting(self, epoch, position=0, *rest):
    for step in told(self, epoch, position, *rest):
        steps.append([epoch, step.micro_batches[0].tolist()])
        with open(f"seen.{os.environ['JOBKIT_SEEN']}.{os.environ['RANK']}", "w") as file:
            json.dump(steps, file)
        yield step

if "JOBKIT_SEEN" in os.environ:
    Batches.epoch = noting

def plain():
    '''What every number of ranks computes alike.'''
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(6, 6, 3, stride=4, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(96, 12), nn.Tanh(), nn.Linear(12, 10),
    )
"""


def final(result: Result) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint, by name."""
    (folder, *_) = store.found_in(result.paths.checkpoints)
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    found = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def newest(result: Result) -> int:
    """The iteration of the newest whole checkpoint; 0 without one."""
    found = store.found_in(result.paths.checkpoints)
    return int(found[0].name.partition("-")[0]) if found else 0


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def measured(result: Result, attempts: int = 1) -> list[tuple[int, float, float, float]]:
    """Epoch, losses and accuracy of every epoch that any attempt recorded."""
    return [
        (r["epoch"], r["train_loss"], r["val_loss"], r["val_accuracy"])
        for attempt in range(attempts)
        for r in result.records("epoch", attempt)
    ]


def actions(result: Result, attempt: int = 0) -> list[tuple[str, int]]:
    """What an attempt did with checkpoints: (action, iteration)."""
    return [(r["action"], r["iteration"]) for r in result.records("checkpoint", attempt)]


def warnings(result: Result, attempt: int = 0) -> str:
    """The texts that an attempt recorded."""
    return "\n".join(r["text"] for r in result.records("message", attempt))


def kept(result: Result) -> list[str]:
    """The names of all that lies in checkpoints/."""
    return sorted(p.name for p in result.paths.checkpoints.glob("*"))


def seen(
    folder: Path, name: str, ranks: int, epoch: int, fits: Callable[[int], bool] = lambda step: True
) -> list[int]:
    """The samples of an epoch that the ranks trained on in the steps that fit, sorted."""
    files = (folder / f"seen.{name}.{rank}" for rank in range(ranks))
    steps = (step for file in files for step in enumerate(json.loads(file.read_text())))
    return sorted(i for at, (e, part) in steps if e == epoch and fits(at) for i in part)
