"""RunSpec: everything that defines one planned training.

The fields below are the only place where a setting of the training is written down: the payload's
options, the keys of a study's TOML file, spec.json and the columns of results.csv follow from them.
"""

import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.spec import setting as setting_rules
from jobkit.spec.every import Rhythm
from jobkit.spec.setting import setting
from jobkit.spec.strategies import FACTS
from jobkit.spec.window import Window, profiled_ranks

STRATEGIES = tuple(FACTS)
ONE_RANK = tuple(name for name, facts in FACTS.items() if facts.one_rank)
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
MODELS = ("cnn", "resnet18", "mlp")
DATASETS = ("cifar10", "synthetic")
DEFAULT_GLOBAL_BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One planned training: a strategy at a size, one repeat. Checked when it is made.

    Raises UsageError, naming the setting and what it may be, for a value out of its range.
    """

    nodes: int = setting(1, "number of nodes", low=1, option=False)
    ranks_per_node: int = setting(1, "ranks on each node: one a GPU", low=1, option=False)
    repeat: int = setting(0, "which repeat of the same settings this is", low=0)
    strategy: str = setting("ddp", "parallel strategy", choices=STRATEGIES)

    model: str = setting("cnn", "cnn, resnet18, mlp, or package.module:factory for your own")
    width: int = setting(1, "factor on the model's channels or hidden units", low=1, high=256)
    dataset: str = setting("cifar10", "cifar10, synthetic, or folder:PATH (a directory or a .tar)")
    train_samples: int | None = setting(
        None, "use only so many training samples (synthetic: make so many)", low=1
    )
    test_samples: int | None = setting(
        None, "use only so many test samples (synthetic: make so many)", low=1
    )
    augment: bool = setting(True, "random crop (padding 4) and horizontal flip")

    epochs: int = setting(5, "passes over the training samples", low=1)
    global_batch_size: int | None = setting(
        None,
        f"samples in one optimizer step over all ranks (default {DEFAULT_GLOBAL_BATCH_SIZE}); "
        "fixed: strong scaling",
        low=1,
    )
    batch_size_per_rank: int | None = setting(
        None, "samples in one optimizer step on each rank; fixed: weak scaling", low=1
    )
    eval_batch_size: int = setting(500, "samples in one evaluation batch on each rank", low=1)
    accumulate: int = setting(1, "split each step into so many micro-batches", low=1)
    optimizer: str = setting("sgd", "optimizer", choices=("sgd", "adamw"))
    lr: float = setting(0.05, "peak learning rate, before --lr-scaling", low=0.0)
    momentum: float = setting(0.9, "momentum of SGD", low=0.0, high=1.0)
    nesterov: bool = setting(True, "Nesterov momentum of SGD")
    weight_decay: float = setting(5e-4, "weight decay", low=0.0)
    lr_schedule: str = setting(
        "onecycle", "course of the learning rate", choices=("onecycle", "cosine", "constant")
    )
    lr_warmup_epochs: float | None = setting(
        None, "epochs of linear rise (default: a quarter of onecycle, else none)", low=0.0
    )
    lr_scaling: str = setting(
        "none",
        "learning rate over global batch / --lr-base-batch-size",
        choices=("none", "linear", "sqrt"),
    )
    lr_base_batch_size: int = setting(256, "the batch size that --lr was found for", low=1)
    clip_norm: float | None = setting(None, "clip the gradient's global norm to this", low=0.0)
    precision: str = setting("fp32", "precision of the compute", choices=("fp32", "bf16", "fp16"))
    seed: int = setting(0, "seed of weights, order and augmentation", low=0, high=2**31 - 1)

    device: str = setting(
        "auto", "auto takes a GPU where there is one", choices=("auto", "cpu", "cuda")
    )
    threads: int = setting(0, "CPU threads a rank (0: the rank's share of the cores)", low=0)
    channels_last: bool = setting(True, "channels-last memory format, where the model takes it")
    compile: bool = setting(False, "torch.compile the model; measure before you keep it")
    keep_memory: bool = setting(
        True, "CPU: keep freed memory in the process, which spares page faults in each iteration"
    )
    warmup_iterations: int = setting(5, "first iterations that are not timed", low=0)
    timeout_s: float = setting(600.0, "seconds that a collective may take", low=1.0)

    ddp_bucket_mib: float = setting(25.0, "ddp: MiB of gradients in one all-reduce", low=0.001)
    ddp_gradient_as_bucket_view: bool = setting(True, "ddp: gradients are views of the buckets")
    fsdp_wrap_min_parameters: int = setting(
        1000, "fsdp: a block with at least so many parameters is sharded on its own", low=1
    )
    fsdp_reshard_after_forward: bool = setting(
        True, "fsdp: free the gathered parameters after the forward pass"
    )
    fsdp_reduce_fp32: bool = setting(True, "fsdp: reduce gradients in fp32, whatever the precision")
    fsdp_cpu_offload: bool = setting(False, "fsdp: keep parameters and optimizer on the CPU")

    activation_checkpointing: bool = setting(
        False, "keep no activations inside a block of the model: compute them again going backward"
    )
    ddp_static_graph: bool = setting(
        False, "ddp: promise that every iteration uses the same parameters in the same order"
    )
    ddp_find_unused_parameters: bool = setting(
        False, "ddp: look in each forward pass for parameters that it does not use"
    )
    ddp_comm_hook: str = setting(
        "none", "ddp: compress gradients before they are sent", choices=COMM_HOOKS
    )
    ddp_powersgd_rank: int = setting(2, "ddp: rank of PowerSGD's approximation", low=1)
    ddp_powersgd_start: int = setting(
        10, "ddp: iterations of plain all-reduce before PowerSGD compresses", low=2
    )
    sync_batchnorm: bool = setting(False, "ddp: batch normalisation over all ranks; needs GPUs")
    zero1: bool = setting(False, "ddp: shard the optimizer's state over the ranks")
    fsdp_wrap: str | None = setting(
        None, "fsdp: classes of the modules to shard on their own, A,B (instead of by size)"
    )
    fsdp_hybrid_replicas: int = setting(
        1, "fsdp: so many sharded copies, as many as nodes to shard inside each node", low=1
    )
    fsdp_prefetch: int = setting(0, "fsdp: gather so many blocks ahead (0: torch's own)", low=0)
    pipeline_stages: int | None = setting(
        None, "pp: ranks in one pipeline, of which more ranks make copies (default: all)", low=1
    )
    pipeline_schedule: str = setting("1f1b", "pp: order of the microbatches", choices=SCHEDULES)
    pipeline_split: str | None = setting(
        None, "pp, mp: names of the modules that begin the second and later stages, A,B"
    )
    microbatches: int | None = setting(
        None, "pp: parts of a batch on their way at once (default: at least one a stage)", low=1
    )

    breakdown_iterations: int = setting(
        10,
        "iterations whose time is taken apart into compute, communication, data wait (0: none)",
        low=0,
        identity=False,
    )
    profile: str | None = setting(
        None, "trace these iterations with torch.profiler, as 20-22", identity=False
    )
    profile_ranks: str = setting("0", "ranks to trace: 0,3 or all", identity=False)
    checkpoint_every: str | None = setting(
        None, "write a checkpoint each: epoch, 200 (iterations), 30s, 10m, 1h", identity=False
    )
    checkpoint_keep: int = setting(2, "how many checkpoints to keep", low=1, identity=False)
    checkpoint_async: bool | None = setting(
        None,
        "write checkpoints while training goes on (default: on GPUs)",
        identity=False,
    )
    stop_signal: str = setting(
        "USR2", "signal on which a run saves and ends", choices=("USR1", "USR2"), identity=False
    )

    data_dir: str | None = setting(
        None, "where data and prepared caches lie (default: $JOBKIT_DATA_DIR)", identity=False
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check_value(f.name, getattr(self, f.name)))
        if self.global_batch_size is not None and self.batch_size_per_rank is not None:
            raise UsageError("give --global-batch-size or --batch-size-per-rank, not both")
        if ":" not in self.model:
            one_of("model", self.model, MODELS)
        if not self.dataset.startswith("folder:"):
            one_of("dataset", self.dataset, (*DATASETS, "folder:PATH"))
        if self.strategy in ONE_RANK and (ranks := self.world_size) > 1:
            raise UsageError(f"strategy '{self.strategy}' runs at 1 rank, not {ranks}; use ddp")
        Rhythm.of(self.checkpoint_every)
        Window.of(self.profile)
        profiled_ranks(self.profile_ranks)
        if self.steps_batch_size < self.accumulate:
            raise UsageError(f"--accumulate {self.accumulate} is more than the samples in a step")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    def steps_batch_size(self) -> int:
        """Samples in one optimizer step over all ranks."""
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * self.world_size
        return self.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    @property
    def scaling(self) -> str:
        """'strong' when the global batch is fixed, 'weak' when the batch a rank is."""
        return "strong" if self.batch_size_per_rank is None else "weak"

    @property
    def slug(self) -> str:
        """The readable part of the run_id."""
        batch = (
            f"b{self.steps_batch_size}"
            if self.scaling == "strong"
            else f"pb{self.batch_size_per_rank}"
        )
        parts = [self.strategy, f"n{self.nodes}", f"g{self.ranks_per_node}", batch]
        return "-".join([*parts, self.precision, f"r{self.repeat}"])

    @property
    def run_id(self) -> str:
        """A readable slug and a short hash of what differs from the defaults.

        Hashing only the differences keeps the id when a later version adds a setting.
        """
        content = {k: v for k, v in self.differences().items() if _META[k]["identity"]}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{self.slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"

    def differences(self) -> dict[str, Any]:
        """The settings that are not at their default."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    def to_dict(self) -> dict[str, Any]:
        """All settings, as JSON takes them."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunSpec":
        """Make a spec; raise UsageError that names the nearest right key for an unknown one."""
        check_keys(values)
        return cls(**values)

    def arguments(self) -> list[str]:
        """The payload's arguments for this spec: the strategy, and what differs from defaults."""
        words: list[str] = []
        for name, value in {"strategy": self.strategy, **self.differences()}.items():
            if not _META[name]["option"] or value is None:
                continue
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else "--no-" + flag[2:])
            else:
                words += [flag, str(value)]
        return words


_META: dict[str, Mapping[str, Any]] = {f.name: f.metadata for f in fields(RunSpec)}
OF_IDENTITY = frozenset(name for name, meta in _META.items() if meta["identity"])
_HINTS = typing.get_type_hints(RunSpec)
SETTINGS: tuple[str, ...] = tuple(_META)


def plain_type(name: str) -> tuple[type, bool]:
    """The type of a setting and whether it may be left out (None)."""
    return setting_rules.plain_type(_HINTS[name])


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise UsageError for a key that is no setting, naming the nearest right one."""
    for key in values:
        if key not in _META:
            raise UsageError(f"unknown setting '{key}'{nearest(str(key), SETTINGS)}")


def check_value(name: str, value: Any) -> Any:
    """Return the value as the setting's type; raise UsageError that says what it may be."""
    return setting_rules.check(name, _HINTS[name], _META[name], value)


def describe(name: str) -> str:
    """What a setting may be, in words."""
    return setting_rules.describe(_HINTS[name], _META[name])
