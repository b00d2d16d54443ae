"""What a forward pass leaves in memory for the backward pass, counted without any data.

The model is made of fake tensors, which have shapes and types but no memory, and goes through one
forward pass; autograd is asked which tensors it saves. So a model of any size is traced in a
moment. Workspaces of kernels are not seen, and the kernels are those of the CPU.
"""

import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from jobkit.errors import UsageError
from jobkit.payload.memory import StagePass
from jobkit.payload.model import build_model
from jobkit.payload.strategies.base import at_least_fp32
from jobkit.payload.strategies.recompute import checkpoint_blocks
from jobkit.spec.runspec import RunSpec

Cut = Callable[[nn.Module], Sequence[nn.Module]]


@functools.lru_cache(maxsize=16)
def fake_model(
    name: str, width: int, hidden: int | None, num_classes: int
) -> tuple[nn.Module, FakeTensorMode]:
    """The model, of fake tensors where its factory allows that, and the mode to run it in.

    Raises UsageError for a model that cannot be made.
    """
    spec = RunSpec(model=name, width=width, hidden=hidden)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            return build_model(spec, num_classes), mode
    except Exception:
        if ":" not in name:
            raise
        return _made_for_real(spec, num_classes), mode


def _made_for_real(spec: RunSpec, num_classes: int) -> nn.Module:
    """A user's factory may look at numbers. With some, a wrong one says what is wrong."""
    try:
        return build_model(spec, num_classes)
    except UsageError:
        raise
    except Exception as error:
        what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        raise UsageError(f"--model {spec.model}: cannot be made: {what}") from None


def passes(
    spec: RunSpec, images: int, num_classes: int, cut: Cut = lambda model: [model]
) -> list[StagePass]:
    """Send a batch of images through the model's stages, one after the other.

    cut: gives the model's stages in order. Raises UsageError for a model that cannot be made or
    whose forward pass cannot be followed without data.
    """
    model, mode = fake_model(spec.model, spec.width, spec.hidden, num_classes)
    stages = cut(model)
    try:
        with mode:
            plain = _Run(spec, model, mode).through(stages, images)
            if not spec.activation_checkpointing:
                return [p for p, _ in plain]
            with _checkpointed(model):
                kept = _Run(spec, model, mode).through(stages, images)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"--model {spec.model}: its forward pass cannot be followed without data ({first})"
        ) from None
    # Going backward, one block at a time has its activations again.
    return [
        StagePass(saved=k.saved + largest, taken=k.taken, given=k.given)
        for (k, _), (_, largest) in zip(kept, plain, strict=True)
    ]


@contextmanager
def _checkpointed(model: nn.Module) -> Iterator[None]:
    """Activation checkpointing inside."""
    blocks = list(model.children())
    before = [block.__dict__.get("forward") for block in blocks]
    checkpoint_blocks(model)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.__dict__["forward"] = forward


class _Run:
    """One pass, and the storages that autograd saved in it, each once."""

    def __init__(self, spec: RunSpec, model: nn.Module, mode: FakeTensorMode) -> None:
        low = spec.low_precision
        # FSDP casts parameters and inputs; the others compute under autocast. fp16 is as large.
        self.cast = torch.bfloat16 if low and spec.strategy == "fsdp" else torch.float32
        self.autocast = low and spec.strategy != "fsdp"
        self.model, self.mode = model, mode
        self.seen: dict[int, torch.UntypedStorage] = {}  # kept, so that no other takes its id
        self.by_block: Counter[str] = Counter()
        self.block = ""

    def through(self, stages: Sequence[nn.Module], images: int) -> list[tuple[StagePass, int]]:
        """Each stage's pass, and the bytes of the block that saved most in it."""
        value: Any = torch.zeros(images, 3, 32, 32)
        handles = [
            handle
            for name, child in self.model.named_children()
            for handle in (
                child.register_forward_pre_hook(lambda *_, n=name: setattr(self, "block", n)),
                child.register_forward_hook(lambda *_: setattr(self, "block", "")),
            )
        ]
        try:
            found = []
            for i, stage in enumerate(stages):
                passed, value = self._stage(stage, _parts(value), last=i == len(stages) - 1)
                blocks = [saved for name, saved in self.by_block.items() if name]
                found.append((passed, max(blocks, default=0)))
            return found
        finally:
            for handle in handles:
                handle.remove()

    def _stage(
        self, stage: nn.Module, inputs: tuple[Any, ...], last: bool
    ) -> tuple[StagePass, Any]:
        self.by_block.clear()
        inputs = tuple(self._fresh(x) for x in inputs)
        state = {name: self._state(p) for name, p in stage.named_parameters()}
        state |= {name: self._own(b) for name, b in stage.named_buffers()}
        taken = sum(self._know(x) for x in inputs if isinstance(x, Tensor))
        for tensor in state.values():
            self._know(tensor)
        with (
            torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x),
            torch.autocast("cpu", torch.bfloat16, enabled=self.autocast),
        ):
            out = torch.func.functional_call(stage, state, inputs)
            if last:
                labels = torch.zeros(len(out), dtype=torch.int64)
                F.cross_entropy(at_least_fp32(out), labels, reduction="sum")
        given = sum(_size(x) for x in _parts(out) if isinstance(x, Tensor))
        return StagePass(saved=self.by_block.total(), taken=taken, given=given), out

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)

    def _state(self, parameter: Tensor) -> Tensor:
        """A parameter as the pass sees it."""
        return self._own(parameter).detach().to(self.cast).requires_grad_(parameter.requires_grad)

    def _fresh(self, value: Any) -> Any:
        """What a stage was sent: no longer part of the graph before it."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        sent = value.requires_grad
        cast = self.cast if self.cast is not torch.float32 else value.dtype
        return value.detach().to(cast).requires_grad_(sent)

    def _know(self, tensor: Tensor) -> int:
        """Take no more notice of a tensor's storage; return its bytes."""
        storage = tensor.untyped_storage()
        self.seen[storage._cdata] = storage
        return _size(tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = storage
            self.by_block[self.block] += storage.nbytes()
        return tensor


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
