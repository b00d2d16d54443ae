"""What an optimizer trains: a model's parameters, and those of them with another rate."""

from typing import Any

from torch import nn

from jobkit.spec.runspec import RunSpec


def trained_parameters(model: nn.Module, spec: RunSpec) -> list[Any]:
    """What an optimizer trains: the parameters, or groups of them where biases learn faster.

    A group's lr_factor is of --bias-lr-factor: the training loop gives each group its rate.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    factor = spec.bias_lr_factor
    biases = [p for name, p in trained.items() if name.endswith("bias")]
    if factor == 1 or not biases:
        return list(trained.values())
    decay = spec.weight_decay / factor  # so that both shrink alike
    others = [p for name, p in trained.items() if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": biases, "lr_factor": factor, "weight_decay": decay},
    ]
    return [group for group in groups if group["params"]]
