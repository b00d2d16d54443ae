"""The memory of a rank under each strategy: what it keeps, activations, communication buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from jobkit.errors import UsageError
from jobkit.payload.batches import data_bytes
from jobkit.payload.memory import MemoryInputs, Share, StagePass
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies import Strategy, strategy_class
from jobkit.planner.activations import fake_model, passes
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS, Facts

_CPU = torch.device("cpu")
_PIECES = 1000  # equal parameters that stand for a model of which only the size is known


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The maximum over the ranks, in bytes. None: only the model's size is known."""

    label: str
    spec: RunSpec
    share: Share
    activations: int | None
    communication: int | None
    data: int = 0  # images on the GPU
    host: int = 0  # of share: in the node's memory instead (CPU offload)

    @property
    def total(self) -> int:
        """On the device, as far as it is known."""
        passing = (self.activations or 0) + (self.communication or 0)
        return self.share.total - self.host + passing + self.data


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Whose memory is asked for: a model by its number of classes, or a bare size."""

    num_classes: int = 10
    images: int = 0  # of the data set, which stays on each GPU
    parameters: int | None = None  # the size alone, in equal pieces; no model is made

    def tensors(self, spec: RunSpec) -> tuple[list[Tensor], list[Tensor]]:
        """All parameters and buffers, without data."""
        if self.parameters is None:
            model = self.model(spec)
            return list(model.parameters()), list(model.buffers())
        pieces = min(_PIECES, self.parameters)
        size, more = divmod(self.parameters, pieces)
        sizes = (size + (i < more) for i in range(pieces))
        return [torch.empty(n, device="meta", requires_grad=True) for n in sizes], []

    def model(self, spec: RunSpec) -> nn.Module:
        """The model, of fake tensors. Raises UsageError where it cannot be made."""
        return fake_model(spec.model, spec.width, spec.hidden, self.num_classes)[0]


def label_of(spec: RunSpec) -> str:
    """The name of a strategy with its mode, as variants has it."""
    return FACTS[spec.strategy].label(spec.to_dict())


def variants(base: RunSpec) -> dict[str, RunSpec]:
    """Every strategy and mode with the settings of base, by label.

    base: of any number of ranks; single and dp have one, dp with all devices of a node.
    """
    found = {}
    for name, facts in FACTS.items():
        start = _at_one_rank(base, facts) if facts.one_rank else base
        for label, changes in facts.modes(start.to_dict()).items():
            found[label] = replace(start, strategy=name, **changes)
    return found


def _at_one_rank(base: RunSpec, facts: Facts) -> RunSpec:
    """One process with base's settings; with those of a node's ranks where it has all its GPUs."""
    one: dict[str, Any] = {"nodes": 1, "ranks_per_node": 1, "strategy": facts.name}
    if not facts.whole_node:
        return replace(base, **one)
    on_a_node = replace(base, nodes=1).steps_batch_size
    if base.batch_size_per_rank is None:  # the same images for each device as with more nodes
        on_a_node = max(1, -(-base.steps_batch_size // base.nodes))
    return replace(base, **one, batch_size_per_rank=None, global_batch_size=on_a_node)


def strategy_of(spec: RunSpec) -> Strategy:
    """The strategy, checked. Raises UsageError where its settings cannot be."""
    place = RankEnv(world_size=spec.world_size, local_world_size=spec.ranks_per_node)
    strategy = strategy_class(spec.strategy)(spec, place, _CPU)
    strategy.check()
    return strategy


def footprint(spec: RunSpec, subject: Subject, devices: int = 1) -> Footprint:
    """The memory of the rank that takes most; devices: of dp.

    Raises UsageError where the strategy is not applicable.
    """
    strategy, (parameters, _) = strategy_of(spec), subject.tensors(spec)
    ranks = strategy.largest_ranks(parameters)
    found = [_of_rank(strategy, subject, rank, devices) for rank in ranks]
    return max(found, key=lambda each: each.total)


def _of_rank(strategy: Strategy, subject: Subject, rank: int, devices: int) -> Footprint:
    spec, model = strategy.spec, None
    passed: Sequence[StagePass] = ()
    parameters, buffers = subject.tensors(spec)
    count = sum(p.numel() for p in parameters)
    images = strategy.images_at_once(devices)
    in_step = strategy_of(replace(spec, accumulate=1)).images_at_once(devices)
    in_step *= devices if strategy.facts.whole_node else 1
    if subject.parameters is None:
        model = subject.model(spec)
        stages = strategy.stages_of(model)
        here = [stages[i] for i in strategy.stages_here(rank)]
        parameters = [p for stage in here for p in stage.parameters()]
        buffers = [b for stage in here for b in stage.buffers()]
        passed = passes(spec, images, subject.num_classes, strategy.stages_of)
    else:
        parameters = [*strategy.part_of(parameters, rank)]
    share = strategy.persistent(parameters, buffers, rank)
    inputs = MemoryInputs(
        share=share, parameters=count, model=model, passed=passed, rank=rank, devices=devices
    )
    return Footprint(
        label=label_of(spec),
        spec=spec,
        share=share,
        activations=strategy.activation_bytes(inputs) if passed else None,
        communication=strategy.communication_bytes(inputs),
        data=data_bytes(subject.images, in_step, spec.crop_padding) if subject.images else 0,
        host=strategy.host_bytes(share),
    )


def footprints(
    base: RunSpec, subject: Subject, only: Sequence[str] | None = None
) -> tuple[list[Footprint], dict[str, str]]:
    """Each strategy's footprint, and why the others are not applicable, by label.

    only: of these labels, where they are possible.
    """
    found, refused = [], {}
    for label, spec in variants(base).items():
        if only is not None and label not in only:
            continue
        try:
            found.append(footprint(spec, subject, devices=base.ranks_per_node))
        except UsageError as error:
            refused[label] = str(error)
    return found, refused
