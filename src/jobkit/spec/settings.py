"""The settings of one training, and how a field of any specification is declared and checked.

The fields of the groups are the only place where a setting is written down: the payload's
options, the keys of a study's TOML file, spec.json and the columns of results.csv follow from them.
"""

import functools
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jobkit.errors import UsageError, has_control, one_of
from jobkit.spec.strategies import FACTS

_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_MANY = {str: "strings", int | str: "whole numbers or strings", Any: "values"}


def setting(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    option: bool = True,
    identity: bool = True,
    multiline: bool = False,
    group: str = "",
) -> Any:
    """Declare a field: its default, one line of help, its range, and what it takes part in.

    low: of a list its least length. option: the payload takes it as an argument. identity: it is
    part of the run's identity (its run_id); a setting that cannot change the outcome or the speed,
    such as a path, is not.
    """
    meta = {"help": text, "choices": choices, "low": low, "high": high, "multiline": multiline}
    meta |= {"option": option, "identity": identity, "group": group}
    if default == {}:
        return field(default_factory=dict, metadata=meta)
    return field(default=default, metadata=meta)


def check_fields(spec: Any) -> None:
    """Check every field of a frozen dataclass and give it its field's type; raises UsageError."""
    for name, hint, meta, default in _rules(spec.__class__):
        value = getattr(spec, name)
        # Most are at their default, which is sound; an empty list may be too short.
        if type(value) is not type(default) or value != default or type(value) is tuple:
            object.__setattr__(spec, name, check(name, hint, meta, value))


@functools.cache
def _rules(kind: type) -> tuple[tuple[str, Any, Mapping[str, Any], Any], ...]:
    """The name, type hint, metadata and default of each field of a dataclass."""
    hints = typing.get_type_hints(kind)
    return tuple((f.name, hints[f.name], f.metadata, f.default) for f in fields(kind))


def plain_type(hint: Any) -> tuple[Any, bool]:
    """The type in a field's hint and whether the field may be left out (None)."""
    if isinstance(hint, types.UnionType) and types.NoneType in typing.get_args(hint):
        (plain,) = (a for a in typing.get_args(hint) if a is not types.NoneType)
        return plain, True
    return hint, False


def check(name: str, hint: Any, meta: Mapping[str, Any], value: Any) -> Any:
    """Return the value as the field's type; raise UsageError that says what it may be."""
    plain, optional = plain_type(hint)
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    if (value is None and optional) or plain is Any:
        return value
    if origin is Mapping and isinstance(value, Mapping):
        return {k: check(f"{name} {k}", inner[1], meta, v) for k, v in value.items()}
    low, high = meta.get("low"), meta.get("high")
    if origin is tuple:
        kinds = typing.get_args(inner[0]) or inner
        fits = isinstance(value, (list, tuple)) and len(value) >= (low or 0)
        fits = fits and (Any in kinds or all(type(item) in kinds for item in value))
        value = tuple(value) if fits else value
    else:
        if plain is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        fits = type(value) is plain and not (plain is float and not math.isfinite(value))
        fits = fits and (low is None or low <= value) and (high is None or value <= high)
    if not fits:
        raise UsageError(f"{name} = {value!r}: must be {describe(hint, meta)}")
    if meta.get("choices"):
        one_of(name.replace("_", " "), value, meta["choices"])
    for text in value if origin is tuple else [value]:
        if isinstance(text, str) and has_control(text, multiline=bool(meta.get("multiline"))):
            raise UsageError(f"{name} = {text!r}: has a control character")
    return value


def describe(hint: Any, meta: Mapping[str, Any]) -> str:
    """What a field may be, in words."""
    plain, _ = plain_type(hint)
    origin, inner = typing.get_origin(plain), typing.get_args(plain)
    if origin is Mapping or plain is Any:
        return "a table"
    words = f"a list of {_MANY[inner[0]]}" if origin is tuple else _ONE[plain]
    low, high = meta.get("low"), meta.get("high")
    if low is not None and high is not None:
        return f"{words} from {low} to {high}"
    return f"{words}, {low} or more" if low is not None else words


STRATEGIES = tuple(FACTS)
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
DEFAULT_GLOBAL_BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one training. group: a group of a command's help begins there."""

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
    ddp_bucket_mib: float = setting(
        25.0, "ddp: bucket size of the all-reduce in MiB", low=0.001, group="strategy ddp"
    )
    ddp_find_unused_parameters: bool = setting(False, "ddp: find unused parameters in each pass")
    ddp_comm_hook: str = setting(
        "none", "ddp: compress gradients before they are sent", choices=COMM_HOOKS
    )
    sync_batchnorm: bool = setting(False, "ddp: batch normalisation over all ranks; needs GPUs")
    fsdp_wrap: str | None = setting(
        None,
        "fsdp: module classes that become sharding units, as A,B (instead of by size)",
        group="strategy fsdp",
    )
    fsdp_group_mib: float = setting(
        4.0, "fsdp: MiB of parameters to which blocks are merged (0: each on its own)", low=0.0
    )
    fsdp_reshard_after_forward: bool = setting(
        True, "fsdp: free the gathered parameters after the forward pass"
    )
    fsdp_reduce_fp32: bool = setting(True, "fsdp: reduce gradients in fp32 at any precision")
    fsdp_cpu_offload: bool = setting(False, "fsdp: keep parameters and optimizer on the CPU")
    fsdp_hybrid_replicas: int = setting(
        1, "fsdp: HSDP replicas (the number of nodes: shard inside each node)", low=1
    )
    fsdp_prefetch: int = setting(0, "fsdp: prefetch depth in blocks (0: torch's default)", low=0)
    pipeline_stages: int | None = setting(
        None, "pp: ranks per pipeline (default: all)", low=1, group="strategies pp and mp"
    )
    pipeline_schedule: str = setting("1f1b", "pp: order of the microbatches", choices=SCHEDULES)
    pipeline_split: str | None = setting(
        None, "pp, mp: names of the modules that begin the second and later stages, as A,B"
    )
    microbatches: int | None = setting(
        None, "pp: microbatches per batch (default: at least one per stage)", low=1
    )
    checkpoint_every: str | None = setting(
        None,
        "checkpoint interval: epoch, 200 (iterations), 30s, 10m or 1h (default: none)",
        identity=False,
        group="checkpoints",
    )
    checkpoint_keep: int = setting(2, "number of checkpoints to keep", low=1, identity=False)
    checkpoint_async: bool | None = setting(
        None, "write checkpoints in the background (default: on GPUs)", identity=False
    )
    checkpoint_checksums: bool = setting(
        False, "read each file of a checkpoint again for its SHA-256", identity=False
    )
    stop_signal: str = setting(
        "USR2",
        "signal on which a run saves a checkpoint and ends",
        choices=("USR1", "USR2"),
        identity=False,
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
        "iterations after which the ranks' parameters are compared; code 4 where they differ",
        low=0,
        identity=False,
    )
