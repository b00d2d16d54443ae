"""The communication time of a strategy's step at given bandwidths, and what a model sends.

Latency is left out, and how much is overlapped with the compute is not known. The messages and
the ring's formulas are those of spec/strategies.py and spec/traffic.py.
"""

import math

from jobkit.payload.strategies.fsdp import FSDP
from jobkit.payload.strategies.pipeline import Pipeline
from jobkit.payload.strategies.shard_groups import model_size, sizes
from jobkit.planner.activations import passes
from jobkit.planner.footprints import Footprint, Subject, strategy_of
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Link, Links, Message, ModelSize, seconds
from jobkit.units import say_seconds


def links(network: float, link: float) -> Links:
    """The links of a node's network and of a GPU to the others of its node, in 10^9 bytes/s."""
    return Links(intra=Link(0.0, 1e-9 / link), inter=Link(0.0, 1e-9 / min(network, link)))


def step_messages(each: Footprint, subject: Subject) -> list[Message] | None:
    """The messages of one optimizer step; None for a pipeline of which only the size is known.

    Raises UsageError as footprint does.
    """
    size = _size(each, subject)
    return FACTS[each.spec.strategy].messages(each.spec.to_dict(), size)


def step_s(messages: list[Message] | None, over: Links) -> float:
    """Seconds of communication in one optimizer step; NaN where it is not known."""
    return math.nan if messages is None else seconds(messages, over)


def _size(each: Footprint, subject: Subject) -> ModelSize:
    """What of the subject decides the traffic under the footprint's strategy."""
    spec = each.spec
    parameters = sum(p.numel() * p.element_size() for p in subject.tensors(spec)[0])
    if subject.parameters is not None:
        return ModelSize(parameters=parameters)
    strategy = strategy_of(spec)
    if isinstance(strategy, Pipeline):
        images = strategy.images_at_once(1)
        passed = passes(spec, images, subject.num_classes, strategy.stages_of)
        return ModelSize(
            parameters=parameters,
            boundary=max((p.given for p in passed[:-1]), default=0),
            microbatches=strategy.parts,
            stage=each.share.gradients,
        )
    if isinstance(strategy, FSDP):
        return model_size(sizes(subject.model(spec), spec))
    return ModelSize(parameters=parameters)


def duration(seconds: float) -> str:
    """Seconds for a reader; a dash where they are not known."""
    return "-" if math.isnan(seconds) else say_seconds(seconds)
