"""Cut a model into the stages of a pipeline, by what its forward pass really calls.

The forward pass is traced with torch.fx, down to the modules between which it may be cut; those
are called whole. So what a stage does and gets is read off the model, not written down again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from jobkit.errors import UsageError


class _Tracer(fx.Tracer):
    """Looks into the modules that hold a cut, and into no other."""

    def __init__(self, open_modules: set[str]) -> None:
        super().__init__()
        self.open_modules = open_modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.open_modules


def cut(model: nn.Module, count: int, names: Sequence[str] = ()) -> list[nn.Module]:
    """The model as `count` modules, each fed with what the one before it returns.

    names: the modules that begin the second and later stages; without them the layers (the
    modules with parameters that the forward pass calls) are shared out evenly. Parameters are
    those of the model, not copies. Raises UsageError for a model that cannot be cut so.
    """
    if count == 1:
        return [model]
    graph = _trace(model, names)
    layers = [node for node in graph.graph.nodes if _is_layer(graph, node)]
    if count > len(layers):
        raise UsageError(f"{count} pipeline stages are more than the model's {len(layers)} layers")
    begins = [layers[len(layers) * i // count] for i in range(1, count)]
    if names:
        begins = _begins_named(graph, names)
    if len(begins) != count - 1:
        raise UsageError(
            f"--pipeline-split names {len(begins)} modules: {count} stages begin at {count - 1}"
        )
    stage, stage_of = 0, {}
    for node in graph.graph.nodes:
        stage += node in begins
        stage_of[node] = stage
    for empty in set(range(count)) - {stage_of[layer] for layer in layers}:
        raise UsageError(f"the model cannot be cut so: stage {empty} would have no layer")
    # A stage receives from the one before it alone: nothing may skip one.
    for node, stage in stage_of.items():
        late = [s for user in node.users if (s := stage_of[user]) > stage + 1]
        if late and node.op != "get_attr":
            raise UsageError(
                f"the model cannot be cut so: stage {late[0]} needs '{node.name}' of stage "
                f"{stage}; choose other modules with --pipeline-split"
            )
    whole = split_module(graph, model, lambda node: stage_of[node])
    return [getattr(whole, f"submod_{i}") for i in range(count)]


def _trace(model: nn.Module, names: Sequence[str]) -> fx.GraphModule:
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not name:
            raise UsageError(
                f"--pipeline-split: the model has no module '{name}' "
                f"(it has: {', '.join(n for n, _ in model.named_children())}, ...)"
            )
    parents = {name.rsplit(".", i)[0] for name in names for i in range(1, name.count(".") + 1)}
    try:
        return fx.GraphModule(model, _Tracer(parents).trace(model))
    except (fx.proxy.TraceError, TypeError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(
            f"the model cannot be cut into stages: its forward pass cannot be traced ({first})"
        ) from None


def _is_layer(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node has parameters to train: a stage without any would have no optimizer."""
    if node.op != "call_module":
        return False
    return any(p.requires_grad for p in graph.get_submodule(str(node.target)).parameters())


def _begins_named(graph: fx.GraphModule, names: Sequence[str]) -> list[fx.Node]:
    """The first node that calls each of the modules, in the order of the names."""
    nodes = list(graph.graph.nodes)
    targets = [node.target for node in nodes]
    for name in names:
        if name not in targets:
            raise UsageError(f"--pipeline-split: the forward pass does not call '{name}'")
    places = [targets.index(name) for name in names]
    if places != sorted(set(places)):
        raise UsageError("--pipeline-split: the names must be in the order of the forward pass")
    return [nodes[place] for place in places]


def owners(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, int]:
    """The stage of each parameter, by its name in the model.

    Raises UsageError for one that two stages share or that none uses.
    """
    held = [{id(p) for p in stage.parameters()} for stage in stages]
    stage_of: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        users = [i for i, parameters in enumerate(held) if id(parameter) in parameters]
        if len(users) != 1:
            what = f"shared by stages {users}" if users else "used by no stage"
            raise UsageError(f"the model cannot be cut so: parameter '{name}' is {what}")
        stage_of[name] = users[0]
    return stage_of


def tensors_only(stages: Sequence[nn.Module], blank: torch.Tensor) -> torch.Size:
    """Run blank images through the stages; return the shape of the logits.

    Raises UsageError where something other than tensors goes from one stage to the next.
    """
    value: object = blank
    for i, stage in enumerate(stages):
        parts = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise UsageError(
                f"the model cannot be cut so: stage {i} needs a {type(parts[-1]).__name__}, and "
                "only tensors can be sent; choose other modules with --pipeline-split"
            )
        with torch.no_grad():
            training = stage.training
            value = stage.eval()(*parts)
            stage.train(training)
    assert isinstance(value, torch.Tensor)
    return value.shape


class Sendable(nn.Module):
    """A stage that gives contiguous results and gradients, as only such tensors can be sent."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the stage gives, a tensor or several."""
        views = [x.view_as(x) for x in inputs]
        for view in views:
            if view.requires_grad:
                view.register_hook(Tensor.contiguous)
        out = self.stage(*views)
        if isinstance(out, Tensor):
            return out.contiguous()
        return tuple(part.contiguous() for part in out)
