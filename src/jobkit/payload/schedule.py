"""The learning rate of each optimizer step, as a pure function."""

import math

from jobkit.spec.runspec import RunSpec

_RISE = {"onecycle": 0.25, "triangular": 0.23}  # share of the training in which the rate rises
_FIRST, _LAST = 0.2, 0.07  # of the peak: where triangular begins and ends


def peak_lr(spec: RunSpec) -> float:
    """The highest learning rate: --lr, scaled by the global batch (Goyal et al., 2017)."""
    factor = spec.steps_batch_size / spec.lr_base_batch_size
    return spec.lr * {"none": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}[spec.lr_scaling]


def learning_rate(spec: RunSpec, step: float, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0 over the whole training.

    A training resumed with another batch size may be between two steps.

    onecycle rises and falls linearly, ending near 0; triangular does so between 20 % and 7 % of
    the peak (Keller Jordan, arXiv 2404.00498); cosine falls as half a cosine.
    """
    total = total_steps(spec, steps_per_epoch)
    warmup_epochs = spec.lr_warmup_epochs
    if warmup_epochs is None:
        warmup_epochs = _RISE.get(spec.lr_schedule, 0.0) * total / steps_per_epoch
    warmup = min(warmup_epochs * steps_per_epoch, total - 1)
    peak = peak_lr(spec)
    if step < warmup:
        if spec.lr_schedule == "triangular":
            return peak * (_FIRST + (1 - _FIRST) * step / warmup)
        return peak * (step + 1) / (warmup + 1)
    left = (total - step) / max(total - warmup, 1)
    if spec.lr_schedule == "onecycle":
        return peak * left
    if spec.lr_schedule == "triangular":
        return peak * (_LAST + (1 - _LAST) * left)
    if spec.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return peak


def total_steps(spec: RunSpec, steps_per_epoch: int) -> int:
    """The steps of the whole training: those of all epochs, or of --max-steps if that is less."""
    steps = spec.epochs * steps_per_epoch
    return steps if spec.max_steps is None else min(steps, spec.max_steps)
