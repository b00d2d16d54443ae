"""RunSpec: the settings of one training.

Its fields are the only place where a setting is written down: the payload's options, the keys of a
study's TOML file, spec.json and the columns of results.csv follow from them.
"""

import copy
import hashlib
import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, TypeVar

from jobkit.errors import UsageError, nearest, one_of
from jobkit.spec.dataset import WITH_PATH
from jobkit.spec.settings import check_fields, plain_type, setting
from jobkit.spec.strategies import FACTS

STRATEGIES = tuple(FACTS)
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
SCHEDULES = ("gpipe", "1f1b")
DEFAULT_GLOBAL_BATCH_SIZE = 512
ONE_RANK = tuple(name for name, facts in FACTS.items() if facts.one_rank)
MODELS = ("cnn", "fast_cnn", "resnet18", "mlp")
DATASETS = ("cifar10", "synthetic")
_BATCHES = ("global_batch_size", "batch_size_per_rank")  # one of the two
_EVERY = re.compile(r"([1-9][0-9]{0,8})|([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])")
_NOT_COMPARED = ("nodes", "ranks_per_node", "repeat", *_BATCHES, "data_dir")

Run = TypeVar("Run", bound="AnyRun")


class AnyRun:
    """What runs of any program have in common: frozen dataclasses, checked when they are made."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    nodes: int
    ranks_per_node: int

    @classmethod
    def from_dict(cls: type[Run], values: Mapping[str, Any]) -> Run:
        """Make a spec; raise UsageError that names the nearest right key for an unknown one."""
        check_keys(values, cls.__dataclass_fields__)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return dict(vars(self))

    def with_values(self: Run, **values: Any) -> Run:
        """The run with some values that are known to be right: nothing is checked again."""
        run = copy.copy(self)
        vars(run).update(values)
        return run

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def differences(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        values = {f: getattr(self, f.name) for f in fields(self)}
        return {f.name: v for f, v in values.items() if v not in (f.default, {})}

    def with_hash(self, slug: str) -> str:
        """A run_id: a readable slug and a short hash of what differs from the defaults.

        Hashing only the differences keeps the id when a later version adds a setting.
        """
        identity = {f.name for f in fields(self) if f.metadata["identity"]}
        content = {k: v for k, v in self.differences().items() if k in identity}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class Every:
    """When checkpoints are written: after iterations, or seconds, or each epoch; or never."""

    iterations: int | None = None
    seconds: float | None = None
    epochs: bool = False

    @classmethod
    def of(cls, text: str | None) -> "Every":
        """Read epoch, 200 (iterations), 30s, 10m or 1h. Raises UsageError for anything else."""
        if text in (None, "epoch"):
            return cls(epochs=text is not None)
        match = _EVERY.fullmatch(text or "")
        if match and match[1]:
            return cls(iterations=int(match[1]))
        if match and (seconds := float(match[2]) * {"s": 1, "m": 60, "h": 3600}[match[3]]) > 0:
            return cls(seconds=seconds)
        raise UsageError(
            f"checkpoint_every = {text!r}: must be epoch, a number of iterations (200), or a time "
            "(30s, 10m, 1h)"
        )


@dataclass(frozen=True, kw_only=True)
class RunSpec(AnyRun):
    """One planned training: a strategy at a size, one repeat. group: one of a help begins there.

    Raises UsageError, naming the setting and what it may be, for a value out of its range.
    """

    nodes: int = setting(1, "number of nodes", low=1, option=False, group="run")
    ranks_per_node: int = setting(1, "ranks per node: one per GPU", low=1, option=False)
    repeat: int = setting(0, "index of this repeat of the same settings", low=0)
    strategy: str = setting("ddp", "parallel strategy", choices=STRATEGIES)
    epochs: int = setting(5, "passes over the training samples", low=1)
    max_steps: int | None = setting(None, "optimizer steps after which a run ends as ok", low=1)
    seed: int = setting(0, "seed of weights, order and augmentation", low=0, high=2**31 - 1)
    device: str = setting(
        "auto", "cuda, cpu, or auto: a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    threads: int = setting(0, "CPU threads per rank (0: the rank's share of the cores)", low=0)
    timeout_s: float = setting(600.0, "timeout of a collective in seconds", low=1.0)
    model: str = setting(
        "cnn", "cnn, fast_cnn, resnet18, mlp, or package.module:factory for your own", group="model"
    )
    hidden: int | None = setting(
        None, "mlp: units of each hidden layer (default: 512 and 256, times --width)", low=1
    )
    width: int = setting(1, "factor on the model's channels or hidden units", low=1, high=256)
    precision: str = setting(
        "auto",
        "precision of the compute; auto: bf16 on a GPU that has it, else fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    fp32: str = setting(
        "auto",
        "GPU: fp32 of convolutions and matrix products; auto: tf32, with --deterministic ieee",
        choices=("auto", "ieee", "tf32"),
    )
    deterministic: bool = setting(
        False, "GPU: the same bits in each run on the same GPUs and software; slower, fp32"
    )
    channels_last: bool = setting(True, "channels-last memory format, if the model supports it")
    compile: bool = setting(False, "torch.compile the model; check that it is faster")
    compile_mode: str = setting(
        "default",
        "mode of torch.compile; reduce-overhead: CUDA graphs, for steps bound by the host",
        choices=("default", "reduce-overhead", "max-autotune"),
    )
    activation_checkpointing: bool = setting(
        False, "recompute each block's activations in the backward pass"
    )
    dataset: str = setting(
        "cifar10",
        "cifar10, synthetic, folder:PATH (a directory), or idx:PATH (MNIST's files)",
        group="data and batches",
    )
    data_dir: str | None = setting(
        None, "directory of data and prepared caches (default: $JOBKIT_DATA_DIR)", identity=False
    )
    train_samples: int | None = setting(None, "training samples: at most N; synthetic: N", low=1)
    test_samples: int | None = setting(None, "test samples: at most N; synthetic: N", low=1)
    train_split: float | None = setting(
        None,
        "share of the training samples that train; the others are the test samples",
        low=0.001,
        high=0.999,
    )
    augment: bool = setting(True, "random crop within a border of 4 pixels, and horizontal flip")
    global_batch_size: int | None = setting(
        None,
        f"samples in one optimizer step over all ranks (default {DEFAULT_GLOBAL_BATCH_SIZE}); "
        "fixed: strong scaling",
        low=1,
    )
    batch_size_per_rank: int | None = setting(
        None, "samples in one optimizer step on each rank; fixed: weak scaling", low=1
    )
    accumulate: int = setting(1, "gradient accumulation: microbatches per optimizer step", low=1)
    eval_batch_size: int = setting(500, "samples in one evaluation batch on each rank", low=1)
    optimizer: str = setting(
        "sgd", "optimizer", choices=("sgd", "adam", "adamw"), group="optimizer"
    )
    lr: float = setting(0.05, "peak learning rate, before --lr-scaling", low=0.0)
    momentum: float = setting(0.9, "momentum of SGD", low=0.0, high=1.0)
    weight_decay: float = setting(5e-4, "weight decay", low=0.0)
    lr_schedule: str = setting(
        "onecycle", "learning rate schedule", choices=("onecycle", "cosine", "constant")
    )
    lr_scaling: str = setting(
        "none",
        "scale --lr with global batch / --lr-base-batch-size",
        choices=("none", "linear", "sqrt"),
    )
    lr_base_batch_size: int = setting(256, "the batch size that --lr was tuned for", low=1)
    speed_run: bool = setting(False, "the speed run's techniques (docs/recipe.md)")
    clip_norm: float | None = setting(None, "largest global norm of the gradients", low=0.0)
    ddp_bucket_mib: float = setting(25.0, "bucket size of the all-reduce in MiB", low=0.001)
    ddp_find_unused_parameters: bool = setting(False, "find unused parameters in each pass")
    ddp_comm_hook: str = setting("none", "compress gradients that are sent", choices=COMM_HOOKS)
    fsdp_wrap: str | None = setting(
        None, "module classes that become sharding units, as A,B (instead of by size)"
    )
    fsdp_group_mib: float = setting(
        4.0, "MiB of parameters to which blocks are merged (0: each on its own)", low=0.0
    )
    fsdp_reshard_after_forward: bool = setting(True, "free parameters again after the forward pass")
    fsdp_reduce_fp32: bool = setting(True, "reduce gradients in fp32 at any precision")
    fsdp_cpu_offload: bool = setting(False, "keep parameters and optimizer on the CPU")
    fsdp_hybrid_replicas: int = setting(
        1, "HSDP replicas (as many as nodes: shard inside a node)", low=1
    )
    fsdp_prefetch: int = setting(0, "prefetch depth in blocks (0: torch's default)", low=0)
    pipeline_stages: int | None = setting(None, "ranks per pipeline (default: all)", low=1)
    pipeline_schedule: str = setting("1f1b", "order of the microbatches", choices=SCHEDULES)
    microbatches: int | None = setting(
        None, "microbatches per batch (default: at least one per stage)", low=1
    )
    checkpoint_every: str | None = setting(
        None,
        "checkpoint interval: epoch, 200 (iterations), 30s, 10m or 1h (default: none)",
        identity=False,
        group="checkpoints",
    )
    checkpoint_keep: int = setting(2, "number of checkpoints to keep", low=1, identity=False)
    checkpoint_checksums: bool = setting(
        False, "read each file of a checkpoint again for its SHA-256", identity=False
    )
    warmup_iterations: int = setting(
        5, "first iterations, which are not timed", low=0, group="measurement"
    )
    why: int = setting(
        5,
        "steps that are profiled at each of a few places, to say where the time goes (0: none)",
        low=0,
        identity=False,
    )
    check_ranks: int = setting(
        0,
        "iterations after which the ranks' copies of a model are compared; code 4: they differ",
        low=0,
        identity=False,
    )

    parameters: ClassVar[Mapping[str, Any]] = {}  # of a command alone

    def __post_init__(self) -> None:
        check_fields(self)
        if self.global_batch_size is not None and self.batch_size_per_rank is not None:
            raise UsageError("give --global-batch-size or --batch-size-per-rank, not both")
        if ":" not in self.model:
            one_of("model", self.model, MODELS)
        if not self.dataset.startswith(WITH_PATH):
            one_of("dataset", self.dataset, (*DATASETS, "folder:PATH", "idx:PATH"))
        if self.strategy in ONE_RANK and (ranks := self.world_size) > 1:
            raise UsageError(f"strategy '{self.strategy}' runs at 1 rank, not {ranks}; use ddp")
        Every.of(self.checkpoint_every)
        if self.steps_batch_size < self.accumulate:
            raise UsageError(f"--accumulate {self.accumulate} is more than the samples in a step")

    @property
    def steps_batch_size(self) -> int:
        """Samples in one optimizer step over all ranks."""
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * self.world_size
        return self.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    @property
    def low_precision(self) -> bool:
        """Whether it computes in less than fp32. Not known for "auto": then fp32 counts."""
        return self.precision in ("bf16", "fp16")

    @property
    def scaling(self) -> str:
        """'strong' when the global batch is fixed, 'weak' when the batch per rank is."""
        return "strong" if self.batch_size_per_rank is None else "weak"

    @property
    def run_id(self) -> str:
        """Strategy, size, batch, precision and repeat, with a hash of the other settings."""
        weak = self.scaling == "weak"
        batch = f"pb{self.batch_size_per_rank}" if weak else f"b{self.steps_batch_size}"
        size = f"n{self.nodes}-g{self.ranks_per_node}"
        return self.with_hash(f"{self.strategy}-{size}-{batch}-{self.precision}-r{self.repeat}")

    @property
    def whole_node(self) -> bool:
        """Whether one rank uses every GPU of its node."""
        return FACTS[self.strategy].whole_node and self.device != "cpu"

    @property
    def planned_epochs(self) -> int | None:
        """Passes over the training samples; None: the steps end it."""
        return self.epochs if self.max_steps is None else None

    def columns(self) -> dict[str, Any]:
        """The settings by the columns of results.csv; not what the run itself records."""
        columns = self.to_dict() | {
            "world_size": self.world_size,
            "scaling": self.scaling,
            "global_batch_size": self.steps_batch_size,
            "batch_size_per_rank": -(-self.steps_batch_size // self.world_size),
            "epochs_planned": self.epochs,
        }
        del columns["device"], columns["epochs"]
        return columns

    def decided(self, recorded: Mapping[str, Any]) -> "RunSpec":
        """What is planned, with what it leaves to the device as a run recorded it."""
        left = [name for name in ("precision", "fp32") if getattr(self, name) == "auto"]
        known = {n: recorded.get(n) for n in left if recorded.get(n) in _META[n]["choices"]}
        return self.with_values(**known)

    def comparable(self) -> dict[str, Any]:
        """What two runs of one series share: not the size, but the batch that stays as it grows."""
        batch: dict[str, Any] = {"global_batch_size": self.steps_batch_size}
        if self.scaling == "weak":
            batch = {"batch_size_per_rank": self.batch_size_per_rank}
        alike = {k: v for k, v in vars(self).items() if k not in _NOT_COMPARED}
        return {**alike, "scaling": self.scaling, **batch}

    def arguments(self) -> list[str]:
        """What run.sh gets for this run: the strategy, and what differs from the defaults."""
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
SETTINGS: tuple[str, ...] = tuple(_META)
# The type of each setting, of one that may be left out (None) without that.
TYPES = {n: plain_type(hint)[0] for n, hint in typing.get_type_hints(RunSpec).items()}


def overridden(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with some replaced; a batch size that is given replaces the other kind too."""
    replaced = _BATCHES if any(name in changes for name in _BATCHES) else ()
    return {**{k: v for k, v in values.items() if k not in replaced}, **changes}


def check_keys(values: Iterable[str], known: Iterable[str] = SETTINGS) -> None:
    """Raise UsageError for a key that is no setting, naming the nearest right one."""
    for key in values:
        if key not in known:
            raise UsageError(f"unknown setting '{key}'{nearest(str(key), known)}")
