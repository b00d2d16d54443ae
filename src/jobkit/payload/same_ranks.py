"""--check-ranks: whether all ranks with a copy of the model hold the same bits.

After every N-th iteration each rank adds up the bits of each parameter, as integers on its device,
and the sums are gathered. Running statistics and the optimizer's state are not compared.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jobkit.errors import RanksDiffer
from jobkit.payload.batches import Step

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_ranks(trainer: "Trainer", step: Step) -> None:
    """Raise RanksDiffer, on every rank, where two ranks differ; see train.Observer.

    Of two copies held by equally many ranks, that of the lowest rank counts as right.
    """
    iteration = trainer.progress.iteration
    if iteration % trainer.spec.check_ranks:
        return
    parameters = trainer.strategy.named_parameters()
    ranks = trainer.group.gather(checksums(parameters.values()))
    right = Counter(ranks).most_common(1)[0][0]
    for rank, sums in enumerate(ranks):
        for name, value, usual in zip(parameters, sums, right, strict=True):
            if value != usual:
                raise RanksDiffer(
                    f"--check-ranks: after iteration {iteration} rank {rank} has other parameters "
                    f"than rank {ranks.index(right)}, {name} first"
                )


def checksums(parameters: Iterable[Tensor]) -> tuple[int, ...]:
    """The sum of each parameter's bits, as integers."""
    bits = (p.detach().view(_BITS[p.element_size()]) for p in parameters)
    sums = torch.stack([tensor.sum(dtype=torch.int64) for tensor in bits])
    return tuple(sums.tolist())  # one wait for the device
