"""What each strategy has on the GPU that has most, and what a step of it sends.

Parameters, gradients and optimizer state are arithmetic; the passes of a step are followed on
tensors without data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jobkit.errors import UsageError
from jobkit.payload.batches import data_bytes
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies import strategy_class
from jobkit.payload.strategies.base import FP32
from jobkit.planner.activations import Stage, fake_model, follow
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Message

PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "communication", "data")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Whose memory it is: a model by its number of classes, or a bare number of parameters."""

    classes: int = 10
    images: int = 0  # of the data set, which stays on each GPU
    parameters: int | None = None  # no model is made

    def data(self, step_images: int) -> int:
        """Bytes of the data set, and of what is made of it for some steps."""
        return data_bytes(self.images, step_images) if self.images else 0


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on the GPU that has most. None: unknown, as only the model's size is known."""

    spec: RunSpec
    parameters: int
    gradients: int
    stepped: int  # of the gradients whose optimizer state is on this GPU
    offloads: bool = False  # these are in the node's memory
    buffers: int = 0
    activations: int | None = None
    communication: int | None = None
    data: int = 0

    @property
    def optimizer(self) -> int:
        """SGD keeps one number for each momentum, Adam two."""
        copies = 2 if self.spec.optimizer != "sgd" else int(self.spec.momentum > 0)
        return (copies + self.spec.speed_run) * self.stepped

    @property
    def offloaded(self) -> int:
        """Those of these bytes that are in the node's memory instead."""
        return (self.parameters + self.gradients + self.optimizer) * self.offloads

    @property
    def label(self) -> str:
        return FACTS[self.spec.strategy].label(self.spec.to_dict())

    @property
    def total(self) -> int:
        return sum(getattr(self, part) or 0 for part in PARTS) - self.offloaded


def footprints(
    base: RunSpec, subject: Subject, strategies: Sequence[str] = tuple(FACTS)
) -> tuple[list[Footprint], dict[str, str]]:
    """Each strategy and mode with the settings of base, and by label why others are impossible.

    base: of any number of ranks; single and dp have one, dp with all devices of a node.
    """
    possible, refused = [], {}
    for name in strategies:
        facts, start = FACTS[name], base
        if facts.one_rank:
            changes: dict[str, Any] = {"nodes": 1, "ranks_per_node": 1, "strategy": name}
            if facts.whole_node:  # the same images for each device as with more nodes
                whole = -(-base.steps_batch_size // base.nodes)
                changes |= {"batch_size_per_rank": None, "global_batch_size": whole}
            start = replace(base, **changes)
        for label, mode in facts.modes(start.to_dict()).items():
            try:
                spec = replace(start, strategy=name, **mode)
                possible.append(footprint(spec, subject, devices=base.ranks_per_node))
            except UsageError as error:
                refused[label] = str(error)
    return possible, refused


def footprint(spec: RunSpec, subject: Subject, devices: int = 1) -> Footprint:
    """The memory of the GPU that has most under a strategy; devices: the GPUs of dp.

    Raises UsageError where the strategy is not applicable.
    """
    facts, strategy = FACTS[spec.strategy], strategy_of(spec)
    shards = facts.state_shards(spec.to_dict())
    if subject.parameters is not None:
        size = FP32 * subject.parameters
        parameters, gradients, stepped = (-(-size // n) for n in shards)
        return Footprint(
            spec=spec,
            parameters=parameters,
            gradients=gradients,
            stepped=stepped,
            offloads=strategy.offloads,
            communication=strategy.step_memory(None, size, gradients)[0],
        )
    if facts.splits_model:
        stages = follow_stages(strategy, subject)
        ranks = [_of_pipeline_rank(strategy, subject, stages, r) for r in range(strategy.ranks)]
        return max(ranks, key=lambda footprint: footprint.total)
    devices = devices if facts.whole_node else 1
    step_images = -(-spec.steps_batch_size // (devices if facts.whole_node else spec.world_size))
    images, added_up = -(-step_images // spec.accumulate), spec.accumulate > 1
    new = not (added_up or strategy.keeps_gradients)
    (stage,) = follow(spec, images, subject.classes, new)
    sizes = (stage.parameters, stage.gradients, stage.gradients)
    parameters, gradients, stepped = (-(-size // n) for size, n in zip(sizes, shards, strict=True))
    model = model_of(spec, subject.classes)
    communication, counted = strategy.step_memory(model, stage.gradients, gradients)
    return Footprint(
        spec=spec,
        parameters=parameters,
        gradients=gradients,
        stepped=stepped,
        offloads=strategy.offloads,
        buffers=stage.buffers,
        activations=stage.taken + stage.peak - counted,
        communication=communication,
        data=subject.data(step_images * devices),
    )


def _of_pipeline_rank(
    strategy: Any, subject: Subject, stages: Sequence[Stage], rank: int
) -> Footprint:
    spec, stage, parts = strategy.spec, stages[rank], strategy.microbatches
    later = strategy.ranks - 1 - rank
    # torch has a buffer for what each microbatch receives, going forward and backward.
    received = stage.taken + stage.given * (later > 0)
    return Footprint(
        spec=spec,
        parameters=stage.parameters,
        gradients=stage.gradients,
        stepped=stage.gradients,
        buffers=stage.buffers,
        activations=(strategy.waiting(rank) - 1) * stage.saved + stage.peak,
        communication=received * parts + stage.gradients * (strategy.data_world_size > 1),
        data=subject.data(-(-spec.steps_batch_size // strategy.data_world_size)),
    )


def follow_stages(strategy: Any, subject: Subject) -> list[Stage]:
    """The passes of a pipeline's stages over one microbatch."""
    spec = strategy.spec
    parts = strategy.data_world_size * spec.accumulate * strategy.microbatches
    images = -(-spec.steps_batch_size // parts)
    return follow(spec, images, subject.classes, new=False, cut=strategy.stages_of)


def strategy_of(spec: RunSpec) -> Any:
    """The strategy, checked. Raises UsageError where its settings cannot be."""
    place = RankEnv(world_size=spec.world_size, local_world_size=spec.ranks_per_node)
    strategy = strategy_class(spec.strategy)(spec, place, torch.device("cpu"))
    strategy.check()
    return strategy


def step_messages(footprint: Footprint, subject: Subject) -> list[Message] | None:
    """The messages of one optimizer step; None where they are not known."""
    spec, facts = footprint.spec, FACTS[footprint.spec.strategy]
    strategy = strategy_of(spec)
    size = strategy.size_of(model_of(spec, subject.classes))
    if facts.splits_model:
        given = [stage.given for stage in follow_stages(strategy, subject)]
        size = replace(
            size,
            boundary=max(given[:-1], default=0),
            microbatches=strategy.microbatches,
            stage=footprint.gradients,
        )
    return facts.messages(spec.to_dict(), size)


def idle_share(spec: RunSpec) -> float:
    """(p - 1) / (m + p - 1) for p ranks of a pipeline and m microbatches.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    if not FACTS[spec.strategy].splits_model:
        return 0.0
    strategy = strategy_of(spec)
    later = strategy.ranks - 1
    return later / (strategy.microbatches + later)


def model_of(spec: RunSpec, classes: int) -> Any:
    """The model, of tensors without data."""
    return fake_model(spec.model, spec.width, spec.hidden, classes)[0]
