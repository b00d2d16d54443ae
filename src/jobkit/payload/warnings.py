"""Warnings about a run's settings: each line is printed and recorded."""

import os

import torch

from jobkit.payload.place import RankEnv
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS, owners

_LEAST_EPOCH_S = 1.0
# A setting (or the beginning of its name), what must hold for it to matter, and that in words.
_ONLY_WITH = (
    ("ddp_powersgd", lambda spec: spec.ddp_comm_hook == "powersgd", "--ddp-comm-hook powersgd"),
    ("fsdp_group_mib", lambda spec: spec.fsdp_wrap is None, "no --fsdp-wrap"),
    ("fsdp_reduce_fp32", lambda spec: spec.precision != "fp32", "a lower precision than fp32"),
    ("compile_mode", lambda spec: spec.compile, "--compile"),
    ("momentum", lambda spec: spec.optimizer == "sgd", "optimizer sgd"),
    ("lr_base_batch_size", lambda spec: spec.lr_scaling != "none", "--lr-scaling linear or sqrt"),
    ("width", lambda spec: ":" not in spec.model, "a model of jobkit's own"),
    ("width", lambda spec: spec.hidden is None, "no --hidden"),
    ("hidden", lambda spec: spec.model == "mlp", "--model mlp"),
)


def without_effect(spec: RunSpec, device_type: str) -> list[str]:
    """A line for each setting that is not at its default and changes nothing in this run."""
    changed = spec.differences()
    lines: dict[str, str] = {}
    for name in changed:
        if (strategies := owners(name)) and spec.strategy not in strategies:
            words = f"strategy {' or '.join(strategies)}"
            lines[name] = f"{option(name)} has no effect: it needs {words}"
    for prefix, holds, words in _ONLY_WITH:
        for name in changed:
            if name.startswith(prefix) and not holds(spec):
                lines.setdefault(name, f"{option(name)} has no effect: it needs {words}")
    if "fsdp_cpu_offload" in changed and device_type == "cpu":
        lines.setdefault("fsdp_cpu_offload", "--fsdp-cpu-offload has no effect on the CPU")
    if device_type == "cpu":
        for name in sorted({"fp32", "deterministic"} & changed.keys()):
            if changed[name] != "ieee":  # which the CPU has anyway
                lines[name] = f"{option(name)} has no effect on the CPU"
    return list(lines.values())


def option(name: str) -> str:
    """A setting's name as it is typed."""
    return "--" + name.replace("_", "-")


def of_size(spec: RunSpec, place: RankEnv, device: torch.device, samples: int) -> list[str]:
    """Lines on batches larger than the data, and on more ranks than cores."""
    lines = []
    if spec.steps_batch_size > samples:
        lines.append(
            f"the global batch of {spec.steps_batch_size} is more than the {samples} training "
            "samples: each epoch is one step of all of them"
        )
    cores = len(os.sched_getaffinity(0))
    if device.type == "cpu" and place.local_world_size > cores:
        lines.append(
            f"{place.local_world_size} ranks share {cores} cores: oversubscribed, timings are not "
            "meaningful"
        )
    return lines


def too_short(epoch_time_s: float, device: torch.device) -> str:
    """A line on an epoch too short to measure a GPU by; empty where it is not."""
    if device.type != "cuda" or epoch_time_s >= _LEAST_EPOCH_S:
        return ""
    return (
        f"an epoch takes {epoch_time_s:.2f} s: so short, it measures the host that issues the "
        "operations rather than the GPU; use a larger model, batch or data set"
    )


def of_batch_norm(normalised: bool, spec: RunSpec) -> list[str]:
    """A line on batch normalisation, the one thing that does depend on the number of ranks."""
    part = FACTS[spec.strategy].normalises_over
    if not normalised or spec.world_size == 1 or not part:
        return []
    if spec.strategy == "ddp" and spec.sync_batchnorm:
        return []
    text = f"the model has batch normalisation, which takes its statistics over each {part}"
    return [f"{text}: losses change with the number of ranks"]
