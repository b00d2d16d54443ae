"""The table of the parallel strategies: all that is known of each one without torch.

What needs torch is in the class that `code` names, in payload/strategies. docs/contributing.md
says how to add one; options, studies, memory, advice, forecasts and verify follow.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jobkit.spec.traffic import Message, ModelSize, Scope, scope_of
from jobkit.units import MIB

Settings = Mapping[str, Any]  # of a RunSpec, or a row of results.csv
# Share of the bytes of fp32, for a precision or a hook; auto counts as fp32.
_OF_FP32 = {"none": 1.0, "auto": 1.0, "fp32": 1.0, "fp16": 0.5, "bf16": 0.5}


@dataclass(frozen=True)
class Variant:
    """A way to run a strategy that `verify` compares with one process."""

    label: str
    settings: Settings = field(default_factory=dict)
    within: float | None = None  # largest relative difference; None: of rounding alone
    worlds: tuple[int, ...] | None = None  # None: any number of ranks


class Facts:
    """What is known of one strategy. Its class in payload/strategies has the rest."""

    name: ClassVar[str]
    code: ClassVar[str]  # its class, as MODULE.CLASS of payload/strategies
    one_rank: ClassVar[bool] = False  # it is one process
    whole_node: ClassVar[bool] = False  # one process that drives all GPUs of its node
    splits_model: ClassVar[bool] = False  # into stages, as Pipeline; the others split the batch
    refuses: ClassVar[Mapping[str, str]] = {}  # settings that have no meaning here, and why
    owns: ClassVar[tuple[str, ...]] = ()  # settings (or how their names begin) that others ignore
    copies_model: ClassVar[bool] = False  # whole, the same bits on each of its ranks
    normalises_over: ClassVar[str] = "rank's own part of the batch"  # statistics; "": the batch
    verified: ClassVar[tuple[Variant, ...]]

    def label(self, settings: Settings) -> str:
        """The name of the strategy with its mode: the first whose changes are these settings."""
        modes = self.modes(settings).items()
        return next(label for label, mode in modes if settings == {**settings, **mode})

    def modes(self, settings: Settings) -> dict[str, Settings]:
        """Its modes by label, each as what it changes in the settings."""
        return {self.name: {}}

    def shards(self, settings: Settings) -> int:
        """Parts of equal size in which the ranks hold the model; pipelines have their stages."""
        return 1

    def state_shards(self, settings: Settings) -> tuple[int, int, int]:
        """As shards, of parameters, gradients and the optimizer's state apart."""
        return (self.shards(settings),) * 3

    def messages(self, settings: Settings, size: ModelSize) -> list[Message] | None:
        """What one optimizer step sends; None where it does not follow from the size."""
        return []


def _world(settings: Settings) -> int:
    return int(settings["nodes"] * settings["ranks_per_node"])


class SingleFacts(Facts):
    """One process without communication: the reference."""

    name, code = "single", "local.Single"
    one_rank = True
    verified: ClassVar[tuple[Variant, ...]] = (Variant("single", worlds=(1,)),)


class DPFacts(Facts):
    """nn.DataParallel: one process copies the model to the GPUs of its node, and sends nothing."""

    name, code = "dp", "local.DP"
    one_rank = whole_node = True
    refuses: ClassVar[Mapping[str, str]] = {
        "compile": "the threads would share one compiled model, which torch does not support",
        "activation_checkpointing": "the copies on the other GPUs would recompute on the first one",
    }
    verified: ClassVar[tuple[Variant, ...]] = (Variant("dp", worlds=(1,)),)


class DDPFacts(Facts):
    """DistributedDataParallel."""

    name, code = "ddp", "ddp.DDP"
    owns: ClassVar[tuple[str, ...]] = ("ddp_",)
    copies_model = True
    verified: ClassVar[tuple[Variant, ...]] = (
        Variant("ddp"),
        Variant("ddp find unused", {"ddp_find_unused_parameters": True}),
        Variant("ddp accumulate, clip", {"accumulate": 3, "clip_norm": 0.05}),
        Variant("ddp checkpointing", {"activation_checkpointing": True}),
        # fp16 keeps 11 bits of a number and bf16 8; PowerSGD keeps what a low rank can hold.
        Variant("ddp fp16 hook", {"ddp_comm_hook": "fp16"}, 2e-2),
        Variant("ddp bf16 hook", {"ddp_comm_hook": "bf16"}, 1e-1),
        Variant("ddp powersgd hook", {"ddp_comm_hook": "powersgd"}, 0.5),
    )

    def messages(self, settings: Settings, size: ModelSize) -> list[Message] | None:
        """An all-reduce of each bucket of gradients.

        What PowerSGD sends depends on its rank and the layers' shapes.
        """
        if settings["ddp_comm_hook"] == "powersgd":
            return None
        # Buckets are filled with gradients before a hook makes them smaller.
        buckets = max(1, math.ceil(size.parameters / (settings["ddp_bucket_mib"] * MIB)))
        sent = size.parameters * _OF_FP32[settings["ddp_comm_hook"]] / buckets
        ranks = scope_of(_world(settings), settings["ranks_per_node"])
        return [Message("all_reduce", sent, ranks, buckets)]


class FSDPFacts(Facts):
    """FSDP2: the whole state sharded, or within each of several replicas (HSDP)."""

    name, code = "fsdp", "fsdp.FSDP"
    owns: ClassVar[tuple[str, ...]] = ("fsdp_",)
    verified: ClassVar[tuple[Variant, ...]] = (
        Variant("fsdp"),
        Variant("fsdp shards kept whole", {"fsdp_reshard_after_forward": False}),
        Variant("fsdp hybrid", {"fsdp_hybrid_replicas": 2}, worlds=(2, 4)),
        Variant("fsdp prefetch", {"fsdp_prefetch": 2}),
        Variant("fsdp by class", {"fsdp_wrap": "Linear"}),
        Variant("fsdp block by block", {"fsdp_group_mib": 0.0}),
        Variant("fsdp one group", {"fsdp_group_mib": 4.0}),
        Variant("fsdp accumulate, clip", {"accumulate": 3, "clip_norm": 0.05}),
        Variant("fsdp checkpointing", {"activation_checkpointing": True}),
    )

    def shards(self, settings: Settings) -> int:
        return _world(settings) // int(settings["fsdp_hybrid_replicas"])

    def modes(self, settings: Settings) -> dict[str, Settings]:
        plain = {"fsdp_hybrid_replicas": 1}
        modes: dict[str, Settings] = {
            "fsdp, full shard": {**plain, "fsdp_reshard_after_forward": True},
            "fsdp, gradients and optimizer": {**plain, "fsdp_reshard_after_forward": False},
        }
        replicas, world = int(settings["fsdp_hybrid_replicas"]), _world(settings)
        if replicas == 1:  # then one per node, or two on one node, where the ranks divide so
            replicas = max(2, settings["nodes"])
            if world % replicas or world <= replicas:
                return modes
        return modes | {"fsdp, hybrid": {"fsdp_hybrid_replicas": replicas}}

    def messages(self, settings: Settings, size: ModelSize) -> list[Message]:
        """Gathers in each microbatch, forward and (when freed in between) backward; a reduction.

        The hybrid mode gathers and reduces inside a replica, then all-reduces over the replicas.
        """
        replicas, per_node = settings["fsdp_hybrid_replicas"], settings["ranks_per_node"]
        shards = self.shards(settings)
        low, microbatches = _OF_FP32[settings["precision"]], int(settings["accumulate"])
        reduced = 1.0 if settings["fsdp_reduce_fp32"] else low
        passes = 1 + bool(settings["fsdp_reshard_after_forward"])  # that gather each group
        inside, messages = scope_of(shards, per_node), list[Message]()
        groups = size.shard_groups or (() if size.kept_groups else (size.parameters,))
        for group, times in (*((g, passes) for g in groups), *((g, 1) for g in size.kept_groups)):
            messages.append(Message("all_gather", group * low, inside, microbatches * times))
            messages.append(Message("reduce_scatter", group * reduced, inside))
            if replicas > 1:
                across = scope_of(replicas, per_node, stride=shards)
                messages.append(Message("all_reduce", group * reduced / shards, across))
        return messages


class PipelineFacts(Facts):
    """Pipeline parallelism: stages over ranks, microbatches that follow each other."""

    name, code = "pp", "pipeline.Pipeline"
    splits_model = True
    owns: ClassVar[tuple[str, ...]] = ("pipeline_", "microbatches")
    refuses: ClassVar[Mapping[str, str]] = {
        "compile": "its stages are traced graphs, which torch compiles again for each microbatch"
    }
    normalises_over = "microbatch"
    verified: ClassVar[tuple[Variant, ...]] = (
        Variant("pp gpipe", {"pipeline_schedule": "gpipe"}),
        Variant("pp 1f1b", {"pipeline_schedule": "1f1b"}),
        Variant("pp accumulate, clip", {"accumulate": 2, "clip_norm": 0.05}),
        Variant("pp checkpointing", {"activation_checkpointing": True}),
        Variant("pp x ddp", {"pipeline_stages": 2, "clip_norm": 0.05}, worlds=(4,)),
    )

    def shards(self, settings: Settings) -> int:
        return int(settings["pipeline_stages"] or _world(settings))

    def messages(self, settings: Settings, size: ModelSize) -> list[Message] | None:
        """The busiest boundary's activations and their gradients; the copies' mean of gradients."""
        if size.boundary is None:
            return None
        ranks, per_node = self.shards(settings), settings["ranks_per_node"]
        pair = Scope(1) if ranks == 1 else Scope(2, 2 if ranks > per_node else 1)
        count = 2 * size.microbatches * int(settings["accumulate"])
        copies = scope_of(_world(settings) // ranks, per_node, stride=ranks)
        return [
            Message("sendrecv", size.boundary, pair, count),
            Message("all_reduce", size.stage, copies),
        ]


class ModelParallelFacts(PipelineFacts):
    """Model parallelism: a pipeline through which the whole batch goes at once."""

    name, code = "mp", "pipeline.ModelParallel"
    owns: ClassVar[tuple[str, ...]] = ()
    normalises_over = ""
    verified: ClassVar[tuple[Variant, ...]] = (
        Variant("mp"),
        Variant("mp accumulate, clip", {"accumulate": 3, "clip_norm": 0.05}),
    )

    def shards(self, settings: Settings) -> int:
        return _world(settings)


_ALL = (SingleFacts, DPFacts, DDPFacts, FSDPFacts, ModelParallelFacts, PipelineFacts)
FACTS: Mapping[str, Facts] = {kind.name: kind() for kind in _ALL}


def owners(setting: str) -> list[str]:
    """The strategies that a setting belongs to, by the longest of owns; none: it belongs to all."""
    fitting = [o for facts in FACTS.values() for o in facts.owns if setting.startswith(o)]
    return [n for n, f in FACTS.items() if fitting and max(fitting, key=len) in f.owns]
