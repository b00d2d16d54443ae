"""What a step's passes take in memory, counted without any data.

The model is made of fake tensors, which have shapes and types but no memory, and goes forward and
backward once; the bytes of the tensors that live are counted. So a model of any size is followed in
a moment. Workspaces inside of kernels are not seen.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jobkit.errors import UsageError, one_line
from jobkit.payload.model import build_model
from jobkit.payload.strategies import strategy_class
from jobkit.payload.strategies.base import FP32, at_least_fp32
from jobkit.payload.strategies.blocks import checkpoint_blocks
from jobkit.spec.runspec import RunSpec

Cut = Callable[[nn.Module], Sequence[nn.Module]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a model and its passes over one batch, in bytes; a model that is not cut is one."""

    parameters: int  # in fp32, which they are kept in
    gradients: int  # of those that are trained
    buffers: int
    saved: int  # by the forward pass, for the backward pass
    peak: int  # at most in both passes, beside gradients
    taken: int  # its input
    given: int  # its output


@functools.lru_cache(maxsize=16)
def fake_model(
    name: str, width: int, hidden: int | None, classes: int, low: bool = False, blocks: bool = False
) -> tuple[nn.Module, FakeTensorMode]:
    """A model of fake tensors; low: in bf16; blocks: with activation checkpointing.

    Raises UsageError for a model that cannot be made.
    """
    spec, mode = RunSpec(model=name, width=width, hidden=hidden), FakeTensorMode()
    # A user's factory may look at numbers: then it is called for real.
    for how in (mode, nullcontext()):
        try:
            with how:
                model = build_model(spec, classes)
            break
        except Exception as error:
            if ":" not in name or (isinstance(error, UsageError) and how is not mode):
                raise
            why = f"{type(error).__name__}: {one_line(str(error))}"
    else:
        raise UsageError(f"--model {name}: cannot be made: {why}")
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            fakes = {key: _fake(t, mode, low) for key, t in tensors.items() if t is not None}
            tensors.update(fakes)  # type: ignore[arg-type]
    if blocks:
        checkpoint_blocks(model)
    return model, mode


def _fake(tensor: Tensor, mode: FakeTensorMode, low: bool) -> Tensor:
    with mode:
        dtype = torch.bfloat16 if low and tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=dtype)
        return nn.Parameter(fake, tensor.requires_grad) if tensor.requires_grad else fake


def follow(
    spec: RunSpec, images: int, classes: int, new: bool, cut: Cut = lambda model: [model]
) -> list[Stage]:
    """Send a batch of images through the model's stages, each forward and then backward.

    new: gradients are made in the backward pass; else they are there before it, as DDP's buckets
    are. cut: gives the model's stages in order. Raises UsageError for a model that cannot be made
    or whose forward pass cannot be followed without data.
    """
    # In bf16, as fp16 is as large: parameters and inputs where the strategy casts them.
    low = spec.low_precision and strategy_class(spec.strategy).casts_parameters
    autocast = spec.low_precision and not low
    blocks = spec.activation_checkpointing
    model, mode = fake_model(spec.model, spec.width, spec.hidden, classes, low, blocks)
    stages = cut(model)
    found = []
    try:
        with mode:
            sent: tuple[Any, ...] = (torch.empty(images, 3, 32, 32),)
            for module in stages:
                stage, sent = _passes(module, sent, new, module is stages[-1], low, autocast)
                found.append(stage)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise UsageError(
            f"--model {spec.model}: its forward pass cannot be followed without data "
            f"({one_line(str(error))[:200]})"
        ) from None
    return found


def _passes(
    module: nn.Module, sent: tuple[Any, ...], new: bool, last: bool, low: bool, autocast: bool
) -> tuple[Stage, tuple[Any, ...]]:
    """A stage's passes, and what it sends to the next one."""
    parameters, buffers, live = [*module.parameters()], [*module.buffers()], LiveBytes()
    trained = [p for p in parameters if p.requires_grad]
    dtype = torch.bfloat16 if low else torch.float32
    inputs = [
        x.detach().to(dtype).requires_grad_(x.requires_grad) if torch.is_floating_point(x) else x
        for x in sent
    ]
    for p in trained:
        p.grad = None if new else torch.zeros_like(p)
    live.ignore(inputs, parameters, buffers, [p.grad for p in trained])
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(*inputs)
        ends = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        if last:
            labels = torch.zeros(len(ends[0]), dtype=torch.int64)
            ends = [F.cross_entropy(at_least_fp32(ends[0]), labels, reduction="sum")]
        saved = live.now
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    for p in trained:
        p.grad = None
    stage = Stage(
        parameters=FP32 * sum(p.numel() for p in parameters),
        gradients=FP32 * sum(p.numel() for p in trained),
        buffers=bytes_of(buffers),
        saved=saved,
        peak=max(0, live.peak - bytes_of(trained) * new),
        taken=bytes_of(inputs),
        given=bytes_of(out),
    )
    return stage, out if isinstance(out, tuple) else (out,)


def bytes_of(tensors: Any) -> int:
    """Bytes of all tensors in a structure of them."""
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, Tensor))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside make, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def ignore(self, *tensors: Any) -> None:
        """Leave out tensors that were there before."""
        storages = [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, Tensor)]
        self._known.update({storage._cdata: storage for storage in storages})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation, and count what is new in its result."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = storage
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, size: int) -> None:
        self.now -= size
