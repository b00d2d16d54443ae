"""A training that compiles nothing does without torch._dynamo, whose import takes a second or two.

torch's optimizers and DDP import it (2.14), only to say that it is not to look into them: where
nothing is compiled there is nobody to tell. Whatever else asks for it, as a user's model that is
compiled, gets the real one.
"""

import importlib
import sys
from collections.abc import Mapping
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

_NAME = "torch._dynamo"
_FSDP = "torch.distributed.tensor"  # computes shapes by what needs torch._dynamo


class _Stand(ModuleType):
    """Answers for a module until that is imported: with what is known, else by importing it."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if _NAME not in sys.modules and name in self._known:
            return self._known[name]
        return getattr(importlib.import_module(self.__name__), name)


def spare() -> None:
    """Keep DDP and the optimizers from importing torch._dynamo; no result changes.

    Does nothing where it is imported already or will be, and leaves alone what another torch does
    elsewhere.
    """
    if _NAME in sys.modules or _FSDP in sys.modules:
        return
    modes = _Stand(f"{_NAME}.utils", {"get_optimize_ddp_mode": lambda: "ddp_optimizer"})
    torch._dynamo = _Stand(_NAME, {"utils": modes})
    for owner, name in (
        (Optimizer, "add_param_group"),
        (Optimizer, "zero_grad"),
        (Optimizer, "state_dict"),
        (Optimizer, "load_state_dict"),
        (DistributedDataParallel, "_inside_ddp_forward"),
    ):
        _let_be(getattr(owner, name, None))
    for kind in (SGD, Adam, AdamW):
        _step_plainly(kind)


def _let_be(function: Any) -> None:
    """Mark what torch._compile._disable_dynamo has wrapped as done already."""
    while inner := getattr(function, "__wrapped__", None):
        code = getattr(function, "__code__", None)
        if code and code.co_filename.endswith("_compile.py"):
            inner.__dynamo_disable = inner
        function = inner


def _step_plainly(kind: type[Optimizer]) -> None:
    """Have an optimizer's step switch autograd off itself, and break no graph of a compiler."""
    step: Any = vars(kind).get("step")
    if getattr(getattr(step, "__code__", None), "co_name", "") != "_use_grad":
        return
    plain = torch.no_grad()(step.__wrapped__)

    @wraps(step)
    def chosen(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        how = step if self.defaults.get("differentiable") else plain
        return how(self, *args, **kwargs)

    kind.step = chosen  # type: ignore[method-assign]
