"""--check-ranks: whether the ranks that hold the same parameters hold the same bits.

After every N-th iteration each rank adds up the bits of its parameters, as integers on its device,
and the sums are gathered. What two ranks hold is the same where its names, and for a shard its
place, are the same: under ddp all parameters on all ranks, under fsdp with replicas the shards of a
place, in several pipelines the layers of a stage. A shard that is on one rank only, running
statistics and the optimizer's state are not compared.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from jobkit.errors import RanksDiffer
from jobkit.payload.batches import Step
from jobkit.payload.strategies.blocks import is_sharded

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameRanks:
    """Compares the ranks' parameters at some iterations of one training; see train.Observer."""

    def __init__(self, trainer: "Trainer", every: int) -> None:
        """Every rank calls. every: iterations, 1 or more."""
        lines = []
        for name, parameter in trainer.strategy.named_parameters().items():
            place: list[int] = []  # of a shard in its mesh, by the dimensions that shard
            if is_sharded(parameter):
                where = parameter.device_mesh.get_coordinate() or ()
                kinds = zip(where, parameter.placements, strict=True)
                place = [at for at, kind in kinds if not kind.is_replicate()]
            lines.append(f"{name} {place}")
        key = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        self._every = every
        self._keys: list[Hashable] = trainer.group.gather(key)
        self.compares = len(set(self._keys)) < len(self._keys)
        if not self.compares:
            trainer.report.info("--check-ranks: no parameter is on two ranks: nothing is compared")

    def wants(self, trainer: "Trainer") -> bool:
        return self.compares and (trainer.progress.iteration + 1) % self._every == 0

    def before(self, trainer: "Trainer", step: Step) -> None:
        pass

    def after(self, trainer: "Trainer", step: Step) -> None:
        """Raise RanksDiffer, on every rank, where two ranks differ. Every rank calls."""
        parameters = trainer.strategy.named_parameters()
        bits = checksums(parameters.values())
        total = bits.sum().reshape(1)
        sums = [torch.empty_like(total) for _ in self._keys]
        dist.all_gather(sums, total)
        pair = first_apart(self._keys, torch.cat(sums).tolist())
        if pair is None:
            return
        rank, right = pair
        every: list[list[int]] = trainer.group.gather(bits.tolist())
        names = trainer.group.gather(list(parameters))[rank]
        rows = zip(names, every[rank], every[right], strict=True)
        name = next(name for name, theirs, expected in rows if theirs != expected)
        raise RanksDiffer(
            f"--check-ranks: after iteration {trainer.progress.iteration} rank {rank} has other "
            f"parameters than rank {right}, {name} first"
        )


@torch.no_grad()
def checksums(parameters: Iterable[Tensor]) -> Tensor:
    """Of each parameter that is here, the sum of its bits as integers: (parameters,) int64."""
    sums = []
    for parameter in parameters:
        local = parameter.to_local() if is_sharded(parameter) else parameter
        bits = local.detach().view(_BITS[local.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums)


def first_apart(keys: Sequence[Hashable], sums: Sequence[int]) -> tuple[int, int] | None:
    """The first rank whose sum is not that of most ranks with its key, and one of those.

    None: all are alike. Of two values held by equally many ranks, that of the lowest rank counts.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for rank, key in enumerate(keys):
        groups[key].append(rank)
    apart: list[tuple[int, int]] = []
    for ranks in groups.values():
        usual = Counter(sums[r] for r in ranks).most_common(1)[0][0]
        right = next(r for r in ranks if sums[r] == usual)
        apart += [(r, right) for r in ranks if sums[r] != usual]
    return min(apart, default=None)
