"""A rank's random numbers, which dropout draws: its own, and kept in checkpoints.

The order of the samples and their augmentation draw nothing here: they follow from the seed, the
epoch and the sample alone, so that any number of ranks sees the same (data/batches.py).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from jobkit.payload.batches import sample_hash

_CPU, _GPU = "random.cpu", "random.cuda"


def begin(seed: int, rank: int, gpus: int = 1, iteration: int = 0) -> None:
    """Begin numbers that differ between ranks, and between the GPUs that one process drives.

    All ranks have seeded alike to make the same weights; with equal masks of dropout they would be
    one draw, not as many as there are ranks. Rank 0 draws as a run on one rank does, unless an
    iteration is given: a run resumed at another size must not draw again what its first
    iterations drew.
    """
    if rank or iteration:
        torch.manual_seed(_mixed(seed, iteration, rank))
    for gpu in range(1, gpus):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(_mixed(seed, iteration, rank + gpu))


def _mixed(seed: int, iteration: int, rank: int) -> int:
    """A seed for a rank; a sum would give rank 1 what rank 0 has in the next repeat."""
    return int(sample_hash(seed, iteration, torch.tensor([rank])))


def state(device: torch.device, gpus: int = 1) -> dict[str, Tensor]:
    """The state of the CPU's generator and of those of the GPUs, by name, on the CPU."""
    found = {_CPU: torch.get_rng_state()}
    if device.type == "cuda":
        found[_GPU] = torch.cuda.get_rng_state(device)
        found |= {f"{_GPU}.{gpu}": torch.cuda.get_rng_state(gpu) for gpu in range(1, gpus)}
    return found


def take(own: Mapping[str, Tensor], device: torch.device, gpus: int = 1) -> None:
    """Take over what state() gave; what is absent stays unchanged."""
    if _CPU in own:
        torch.set_rng_state(own[_CPU])
    if device.type == "cuda":
        if _GPU in own:
            torch.cuda.set_rng_state(own[_GPU], device)
        for gpu in range(1, gpus):
            if (name := f"{_GPU}.{gpu}") in own:
                torch.cuda.set_rng_state(own[name], gpu)
