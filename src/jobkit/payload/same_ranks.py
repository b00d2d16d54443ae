"""--check-ranks: whether the ranks that hold the same parameters hold the same bits.

After every N-th iteration each rank adds up the bits of each parameter, as integers on its device,
and the sums are gathered. What two ranks hold is the same where its name, and for a shard its
place, is the same: under ddp all parameters on all ranks, under fsdp with replicas the shards of a
place, in several pipelines the layers of a stage. A shard that is on one rank only, running
statistics and the optimizer's state are not compared.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jobkit.errors import RanksDiffer
from jobkit.payload.batches import Step
from jobkit.payload.strategies.blocks import is_sharded

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameRanks:
    """Compares the ranks' parameters at some iterations of one training; see train.Observer."""

    def __init__(self, every: int) -> None:
        """every: iterations, 1 or more."""
        self._every, self._told = every, False

    def __call__(self, trainer: "Trainer", step: Step) -> None:
        """Raise RanksDiffer, on every rank, where two ranks differ. Every rank calls."""
        if trainer.progress.iteration % self._every:
            return
        ranks = trainer.group.gather(checksums(trainer.strategy.named_parameters()))
        if not self._told and len({key for sums in ranks for key in sums}) == sum(map(len, ranks)):
            trainer.report.info("--check-ranks: no parameter is on two ranks: nothing is compared")
            self._told = True
        if apart := first_apart(ranks):
            rank, right, name = apart
            raise RanksDiffer(
                f"--check-ranks: after iteration {trainer.progress.iteration} rank {rank} has "
                f"other parameters than rank {right}, {name} first"
            )


Key = tuple[str, tuple[int, ...]]  # a parameter's name and the place of the shard
Sums = Mapping[Key, int]


@torch.no_grad()
def checksums(parameters: Mapping[str, Tensor]) -> Sums:
    """Of what this rank has of each parameter, the sum of its bits as integers."""
    keys, sums = [], []
    for name, parameter in parameters.items():
        place: tuple[int, ...] = ()  # of a shard in its mesh, by the dimensions that shard
        local = parameter.detach()
        if is_sharded(parameter):
            where = parameter.device_mesh.get_coordinate() or ()
            kinds = zip(where, parameter.placements, strict=True)
            place = tuple(at for at, kind in kinds if not kind.is_replicate())
            local = parameter.to_local().detach()
        keys.append((name, place))
        sums.append(local.view(_BITS[local.element_size()]).sum(dtype=torch.int64))
    return dict(zip(keys, torch.stack(sums).tolist(), strict=True))  # one wait for the device


def first_apart(ranks: Sequence[Sums]) -> tuple[int, int, str] | None:
    """The first rank with a sum that most ranks have otherwise, one of those, and the name.

    None: all are alike. Of two values held by equally many ranks, that of the lowest rank counts.
    """
    counts: dict[Key, Counter[int]] = defaultdict(Counter)
    for sums in ranks:
        for key, value in sums.items():
            counts[key][value] += 1
    usual = {key: values.most_common(1)[0][0] for key, values in counts.items()}
    for rank, sums in enumerate(ranks):
        for key, value in sums.items():
            if value != usual[key]:
                right = next(r for r, other in enumerate(ranks) if other.get(key) == usual[key])
                return rank, right, key[0]
    return None
