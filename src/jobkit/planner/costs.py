"""What slows a GPU down in the settings that are asked for, though it changes no result."""

from collections.abc import Iterator

from torch import nn

from jobkit.planner.footprints import Subject, strategy_of
from jobkit.spec.runspec import RunSpec


def costs(spec: RunSpec, subject: Subject) -> Iterator[str]:
    """A line for each. The sources are torch's own (version 2.14)."""
    if spec.strategy == "ddp" and spec.ddp_comm_hook == "powersgd":
        # torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, at the end of each bucket
        yield (
            "--ddp-comm-hook powersgd: the host waits for the GPU in every bucket; it pays only "
            "where the network is slower than that"
        )
    if spec.precision == "fp16" and not strategy_of(spec).can_fuse():
        # torch/amp/grad_scaler.py, _maybe_opt_step; fused optimizers look on the GPU themselves
        yield (
            "--precision fp16: the host waits for the GPU in every step, to see whether a gradient "
            f"overflowed, as torch has no fused {spec.optimizer} for {spec.strategy}; take bf16, "
            "which has no scale"
        )
    if spec.strategy == "ddp" and spec.channels_last and _has_pointwise(spec, subject):
        # torch/csrc/distributed/c10d/reducer.cpp warns that strides do not match the bucket's
        yield (
            "channels-last: the gradients of 1 x 1 convolutions have other strides than DDP's "
            "buckets, and are copied (torch warns of it); with --no-channels-last they are not, "
            "but convolutions may take longer: measure both"
        )


def _has_pointwise(spec: RunSpec, subject: Subject) -> bool:
    """Whether the model has 1 x 1 convolutions that are trained."""
    if subject.parameters is not None:
        return False
    return any(
        isinstance(module, nn.Conv2d)
        and set(module.kernel_size) == {1}
        and module.weight.requires_grad
        for module in subject.model(spec).modules()
    )
