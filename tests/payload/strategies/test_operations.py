"""The operations of one training step: a launch each on a GPU, where they can be the limit."""

import pytest
import torch
from torch import nn

from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.base import make_optimizer
from jobkit.payload.strategies.single import Single
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import Operations

MOST_PASSES, MOST = 38, {"sgd": 1, "adamw": 2}  # of the passes and of the optimizer


def launched(seen: Operations) -> list[str]:
    """The operations without the profiler's marks."""
    return [name for name in seen.names if "record_function" not in name]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_of_the_small_cnn_takes_few_operations(optimizer: str) -> None:
    spec = RunSpec(strategy="single", optimizer=optimizer)
    strategy = Single(spec, RankEnv(), torch.device("cpu"))
    strategy.setup(build_model(spec, 10))
    made = make_optimizer(strategy)
    images, labels = torch.rand(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
    for _ in range(2):  # the first step makes the optimizer's state
        with Operations() as seen:
            strategy.forward_backward(images, labels, 1 / 8, last=True)
        passes = launched(seen)
        with Operations() as step:
            strategy.optimizer_step(made)
    assert len(passes) <= MOST_PASSES, passes
    assert len(launched(step)) <= MOST[optimizer], step.names
    assert seen.waits == step.waits == []


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_mode_of_the_compiler_is_passed_on(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Eagerly, and with a step's beginning marked where the mode has CUDA graphs."""
    seen: list[object] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: seen.append(given))
    mark = lambda: seen.append("step")  # noqa: E731
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    spec = RunSpec(strategy="single", model="mlp", compile=True, compile_mode=mode)
    strategy = Single(spec, RankEnv(), torch.device("cpu"))
    strategy.setup(build_model(spec, 10))
    labels = torch.zeros(2, dtype=torch.int64)
    strategy.forward_backward(torch.rand(2, 3, 32, 32), labels, 0.5, last=True)
    assert seen == [{"mode": mode}, *(["step"] if mode != "default" else [])]
