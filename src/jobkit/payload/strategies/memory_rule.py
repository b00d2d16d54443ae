"""What a rank's memory follows from under a strategy: whole copies, unless it says otherwise.

Nothing here needs a process group or a device: `memory` and `advise` ask before there is a job.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from jobkit.payload.distributed import RankEnv
from jobkit.payload.memory import MemoryInputs, Share, bytes_of, state_bytes
from jobkit.spec.runspec import RunSpec


class MemoryRule(ABC):
    """The memory of the ranks under one strategy."""

    def __init__(self, spec: RunSpec, place: RankEnv) -> None:
        self.spec, self.place = spec, place

    def stages_of(self, model: nn.Module) -> list[nn.Module]:
        """The model as the stages that follow each other; UsageError where it cannot be cut."""
        return [model]

    def stages_here(self, rank: int) -> Sequence[int]:
        """The stages that a rank has."""
        return (0,)

    def part_of(self, parameters: Sequence[Tensor], rank: int) -> Sequence[Tensor]:
        """A rank's part of a model of which only the number of parameters is known."""
        return parameters

    def largest_ranks(self, parameters: Sequence[Tensor]) -> Sequence[int]:
        """Ranks among which is the one that takes most memory."""
        return (0,)

    def persistent(
        self, parameters: Iterable[Tensor], buffers: Iterable[Tensor], rank: int = 0
    ) -> Share:
        """What a rank will keep, from the shapes alone; gradients just before they are freed.

        parameters and buffers: of the whole model, or under pp and mp of the rank's stages. A
        sharded parameter counts by its whole shape; fake and meta tensors will do.
        """
        every = list(parameters)
        trained = [p for p in every if p.requires_grad]
        return Share(
            parameters=sum(map(self.bytes_here, every)),
            gradients=sum(map(self.bytes_here, trained)),
            optimizer=state_bytes(self.spec, self.with_state(trained, rank)),
            buffers=bytes_of(buffers),
        )

    def bytes_here(self, parameter: Tensor) -> int:
        """Bytes of a parameter, or of its gradient, on the rank that has most of it."""
        return bytes_of([parameter])

    def with_state(self, trained: Sequence[Tensor], rank: int) -> list[int]:
        """Bytes of each parameter, or part of one, whose optimizer state a rank keeps."""
        return [bytes_of([p]) for p in trained]

    def images_at_once(self, devices: int) -> int:
        """Images of one forward pass on the rank that has most; devices: of dp."""
        return math.ceil(
            math.ceil(self.spec.steps_batch_size / self.place.world_size) / self.spec.accumulate
        )

    def activation_bytes(self, inputs: MemoryInputs) -> int:
        """What a rank's forward passes leave for its backward passes, at most."""
        return sum(p.taken + p.saved for p in inputs.passed)

    @abstractmethod
    def communication_bytes(self, inputs: MemoryInputs) -> int | None:
        """A rank's buffers for communication; None where they do not follow from the size."""

    def host_bytes(self, share: Share) -> int:
        """What of a rank's share is in the node's memory instead of the GPU's."""
        return 0

    def idle_share(self) -> float:
        """Part of a step in which a rank waits for other stages, at equal stages."""
        return 0.0
