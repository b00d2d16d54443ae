"""Cut a model into the stages of a pipeline, by what its forward pass really calls.

The forward pass is traced with torch.fx, down to the modules that it calls; those stay whole. So
what a stage does and gets is read off the model, not written down again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from jobkit.errors import UsageError


def cut(model: nn.Module, count: int) -> list[nn.Module]:
    """The model as `count` modules, each fed with what the one before it returns.

    The layers (the modules with parameters that the forward pass calls) are shared out evenly.
    Parameters are those of the model, not copies. Raises UsageError for a model that cannot be cut
    so.
    """
    if count == 1:
        return [model]
    tracer = fx.Tracer()
    tracer.is_leaf_module = lambda *_: True  # type: ignore[method-assign]
    try:
        graph = fx.GraphModule(model, tracer.trace(model))
    except (fx.proxy.TraceError, TypeError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(
            f"the model cannot be cut into stages: its forward pass cannot be traced ({first})"
        ) from None
    # A stage without parameters to train would have no optimizer.
    trained = {n for n, m in graph.named_modules() if any(p.requires_grad for p in m.parameters())}
    layers = [n for n in graph.graph.nodes if n.op == "call_module" and n.target in trained]
    if count > len(layers):
        raise UsageError(f"{count} pipeline stages are more than the model's {len(layers)} layers")
    begins = [layers[len(layers) * i // count] for i in range(1, count)]
    stage, stage_of = 0, {}
    for node in graph.graph.nodes:
        stage += node in begins
        stage_of[node] = stage
    # A stage receives from the one before it alone: nothing may skip one.
    for node, stage in stage_of.items():
        late = [s for user in node.users if (s := stage_of[user]) > stage + 1]
        if late and node.op != "get_attr":
            raise UsageError(
                f"the model cannot be cut so: stage {late[0]} needs '{node.name}' of stage {stage}"
            )
    whole = split_module(graph, model, lambda node: stage_of[node])
    return [getattr(whole, f"submod_{i}") for i in range(count)]


def check_owners(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Raise UsageError for a parameter that two stages share or that none uses."""
    held = [{id(p) for p in stage.parameters()} for stage in stages]
    for name, parameter in model.named_parameters():
        users = [i for i, parameters in enumerate(held) if id(parameter) in parameters]
        if len(users) != 1:
            what = f"shared by stages {users}" if users else "used by no stage"
            raise UsageError(f"the model cannot be cut so: parameter '{name}' is {what}")


@torch.no_grad()
def logits_of(stages: Sequence[nn.Module], images: Tensor) -> Tensor:
    """What the stages make of images; UsageError where one sends other things than tensors."""
    value: Any = (images,)
    for i, stage in enumerate(stages):
        for part in value:
            if not isinstance(part, Tensor):
                raise UsageError(
                    f"the model cannot be cut so: stage {i} needs a {type(part).__name__}, and "
                    "only tensors can be sent"
                )
        training = stage.training
        out = stage.eval()(*value)
        stage.train(training)
        value = out if isinstance(out, tuple) else (out,)
    return value[0]


class Sendable(nn.Module):
    """A stage that gives contiguous results and gradients, as only such tensors can be sent."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        views = [x.view_as(x) for x in inputs]
        for view in views:
            if view.requires_grad:
                view.register_hook(Tensor.contiguous)
        out = self.stage(*views)
        if isinstance(out, Tensor):
            return out.contiguous()
        return tuple(part.contiguous() for part in out)
