"""What a strategy sends in one step, and how long that takes at least, by a ring's bandwidth.

A ring of n ranks takes 2 (n - 1) / n x bytes / bandwidth for an all-reduce, and half of it for an
all-gather or a reduce-scatter: the formulas behind the "bus bandwidth" of nccl-tests
(doc/PERFORMANCE.md there). Latency is left out, and how much hides behind the compute is not known.
"""

import math
from dataclasses import dataclass

from jobkit.payload.strategies.pipeline import Pipeline
from jobkit.planner.activations import passes
from jobkit.planner.footprints import Footprint, Subject, strategy_of
from jobkit.spec.runspec import RunSpec


@dataclass(frozen=True, kw_only=True)
class Wires:
    """Bandwidths in 10^9 bytes a second, in each direction."""

    network: float  # of a node
    link: float  # of a GPU to the others of its node

    def of(self, spec: RunSpec, ranks: int) -> float:
        """What a ring of neighbouring ranks has: its slowest part, in bytes a second."""
        crosses = ranks > spec.ranks_per_node
        return 1e9 * (min(self.network, self.link) if crosses else self.link)


def gather_s(size: float, ranks: int, bandwidth: float) -> float:
    """Seconds of an all-gather or reduce-scatter; size: bytes of the whole, on each rank."""
    return (ranks - 1) / ranks * size / bandwidth


def step_s(each: Footprint, subject: Subject, wires: Wires, devices: int = 1) -> float:
    """Seconds of communication in one optimizer step; devices: of dp.

    Raises UsageError as footprint does; NaN for a pipeline of which only the size is known.
    """
    spec = each.spec
    weights = sum(p.numel() * p.element_size() for p in subject.tensors(spec)[0])
    if spec.strategy == "single":
        return 0.0
    if spec.strategy == "dp":  # the first device sends weights to each, and gets its gradients
        return 2 * (devices - 1) * weights / (wires.link * 1e9)
    if spec.strategy == "ddp":
        return _ddp_s(spec, weights, wires)
    if spec.strategy == "fsdp":
        return _fsdp_s(spec, weights, wires)
    return _pipeline_s(each, subject, wires)


def _ddp_s(spec: RunSpec, weights: int, wires: Wires) -> float:
    """An all-reduce of the gradients; under ZeRO-1 also a broadcast of each rank's parameters.

    PowerSGD counts as if it did not compress: by how much depends on its rank and the layers.
    """
    ranks, bandwidth = spec.world_size, wires.of(spec, spec.world_size)
    sent = weights * (0.5 if spec.ddp_comm_hook in ("fp16", "bf16") else 1.0)
    seconds = 2 * gather_s(sent, ranks, bandwidth)
    return seconds + gather_s(weights, ranks, bandwidth) * spec.zero1


def _fsdp_s(spec: RunSpec, weights: int, wires: Wires) -> float:
    """Gathers in each micro-batch, forward and (when freed in between) backward; one reduction.

    The hybrid mode gathers and reduces inside a copy, then all-reduces over the copies, for all
    shards of a node at once over its one network.
    """
    copies = spec.fsdp_hybrid_replicas
    shards = spec.world_size // copies
    low = spec.precision != "fp32"
    gathered = weights / 2 if low else weights
    reduced = weights / 2 if low and not spec.fsdp_reduce_fp32 else weights
    bandwidth = wires.of(spec, shards)
    gathers = spec.accumulate * (2 if spec.fsdp_reshard_after_forward else 1)
    seconds = gathers * gather_s(gathered, shards, bandwidth)
    seconds += gather_s(reduced, shards, bandwidth)
    if copies > 1:
        at_once = min(shards, spec.ranks_per_node) if spec.nodes > 1 else 1
        across = wires.of(spec, spec.world_size)
        seconds += 2 * gather_s(reduced / shards * at_once, copies, across)
    return seconds


def _pipeline_s(each: Footprint, subject: Subject, wires: Wires) -> float:
    """The busiest boundary's activations and their gradients; and the copies' mean of gradients."""
    spec, pipeline = each.spec, strategy_of(each.spec)
    assert isinstance(pipeline, Pipeline)
    if subject.parameters is not None:
        return float("nan")
    pipeline.stages_of(subject.model(spec))
    images = spec.steps_batch_size // (pipeline.data_world_size * spec.accumulate)
    passed = passes(spec, max(1, images), subject.num_classes, pipeline.stages_of)
    busiest = max((p.given for p in passed[:-1]), default=0)
    seconds = 2 * busiest * spec.accumulate / wires.of(spec, pipeline.ranks)
    copies = pipeline.data_world_size
    return seconds + 2 * gather_s(each.share.gradients, copies, wires.of(spec, spec.world_size))


def duration(seconds: float) -> str:
    """Seconds for a reader; a dash where they are not known."""
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def idle_share(spec: RunSpec) -> float:
    """Part of a step in which a rank of a pipeline waits, at equal stages (0 for others).

    (p - 1) / (v m + p - 1) for p ranks, m microbatches and v stages on a rank: Narayanan et al.
    2021, arXiv:2104.04473, section 2.2.
    """
    pipeline = strategy_of(spec)
    if not isinstance(pipeline, Pipeline):
        return 0.0
    on_one = 2 if pipeline.order == "interleaved" and pipeline.ranks > 1 else 1
    return (pipeline.ranks - 1) / (on_one * pipeline.parts + pipeline.ranks - 1)
