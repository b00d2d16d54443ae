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
from jobkit.payload.strategies.fsdp import model_size, shard_groups
from jobkit.planner.activations import FP32, Stage, fake_model, follow
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Message, ModelSize

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
    buffers: int = 0
    activations: int | None = None
    communication: int | None = None
    data: int = 0

    @property
    def optimizer(self) -> int:
        """SGD keeps one number for each momentum, Adam two."""
        copies = 2 if self.spec.optimizer != "sgd" else int(self.spec.momentum > 0)
        return (copies + self.spec.speed_run) * self.gradients

    @property
    def offloaded(self) -> int:
        """Those of these bytes that are in the node's memory instead."""
        if not (self.spec.fsdp_cpu_offload and FACTS[self.spec.strategy].shards_state):
            return 0
        return self.parameters + self.gradients + self.optimizer

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
    shards = facts.shards(spec.to_dict())
    if subject.parameters is not None:
        size = FP32 * subject.parameters
        shard = -(-size // shards)
        unknown = facts.splits_model or (facts.shards_state and spec.fsdp_reshard_after_forward)
        sent = None if unknown else size if facts.shards_state else 0
        return Footprint(spec=spec, parameters=shard, gradients=shard, communication=sent)
    if facts.splits_model:
        stages = follow_stages(strategy, subject)
        ranks = [_of_pipeline_rank(strategy, subject, stages, r) for r in range(strategy.ranks)]
        return max(ranks, key=lambda footprint: footprint.total)
    devices = devices if facts.whole_node else 1
    step_images = -(-spec.steps_batch_size // (devices if facts.whole_node else spec.world_size))
    images, added_up = -(-step_images // spec.accumulate), spec.accumulate > 1
    new = not (added_up or facts.keeps_gradients or facts.shards_state)
    (stage,) = follow(spec, images, subject.classes, new)
    parameters, gradients = -(-stage.parameters // shards), -(-stage.gradients // shards)
    activations, communication = stage.taken + stage.peak, 0
    if facts.shards_state:
        gathered, group, largest = _gathered(spec, subject)
        # A group's gradients are there whole before they are reduced to shards; those that
        # microbatches add up stay whole.
        communication = gathered + max(0, (stage.gradients if added_up else group) - gradients)
        activations -= 0 if added_up else largest
    elif facts.keeps_gradients:
        # A hook that compresses keeps its results beside the buckets; gradients that microbatches
        # add up without a reduction are beside them, too.
        beside = {"none": 0.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 1.0}[spec.ddp_comm_hook]
        communication = int(gradients * (beside + added_up))
    return Footprint(
        spec=spec,
        parameters=parameters,
        gradients=gradients,
        buffers=stage.buffers,
        activations=activations,
        communication=communication,
        data=subject.data(step_images * devices),
    )


def _gathered(spec: RunSpec, subject: Subject) -> tuple[int, int, int]:
    """Bytes of FSDP's gathered parameters, and gradients of its largest group and parameter.

    The root stays gathered; of the blocks there are the one that computes and those gathered ahead,
    or all of them where they are kept after the forward pass.
    """
    model, _ = fake_model(spec.model, spec.width, spec.hidden, subject.classes)
    groups = shard_groups(model, spec)
    root = sum(g.parameters for g in groups if g.root or g.exact)
    blocks = [g.parameters for g in reversed(groups) if not (g.root or g.exact)]
    at_once = 1 + max(1, spec.fsdp_prefetch)
    kept = sum(blocks)
    if spec.fsdp_reshard_after_forward:
        kept = max((sum(blocks[i : i + at_once]) for i in range(len(blocks))), default=0)
    size = 2 if spec.low_precision else FP32
    # Its parameters are free again when a group is reduced, in fp32 where that is set.
    reduced = FP32 if spec.fsdp_reduce_fp32 else size
    largest = max(p.numel() for p in model.parameters())
    return (root + kept) * size, max([root, *blocks]) * reduced, largest * size


def _of_pipeline_rank(
    strategy: Any, subject: Subject, stages: Sequence[Stage], rank: int
) -> Footprint:
    spec, stage, parts = strategy.spec, stages[rank], strategy.microbatches
    later = strategy.ranks - 1 - rank
    # torch has a buffer for what each microbatch receives, going forward and backward.
    received = stage.taken + stage.given * (later > 0)
    # Forward passes that wait for their backward pass, at most: GPipe keeps every microbatch; 1F1B
    # one for each stage from this one to the last.
    waiting = parts if strategy.schedule == "gpipe" else min(parts, later + 1)
    return Footprint(
        spec=spec,
        parameters=stage.parameters,
        gradients=stage.gradients,
        buffers=stage.buffers,
        activations=(waiting - 1) * stage.saved + stage.peak,
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
    size = ModelSize(parameters=footprint.parameters)
    if facts.splits_model:
        strategy = strategy_of(spec)
        given = [stage.given for stage in follow_stages(strategy, subject)]
        size = replace(
            size,
            boundary=max(given[:-1], default=0),
            microbatches=strategy.microbatches,
            stage=footprint.gradients,
        )
    elif facts.shards_state:
        model, _ = fake_model(spec.model, spec.width, spec.hidden, subject.classes)
        size = model_size(shard_groups(model, spec))
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


def parameters_of_model(spec: RunSpec, classes: int) -> int:
    model, _ = fake_model(spec.model, spec.width, spec.hidden, classes)
    return sum(p.numel() for p in model.parameters())
