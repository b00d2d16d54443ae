"""Every strategy computes what one process does, and the check of that would notice if not."""

import dataclasses
import math
import sys
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from jobkit.checks.verify import cli
from jobkit.checks.verify import rank as start
from jobkit.checks.verify.cases import CASES, Case, cases_of
from jobkit.checks.verify.rank import Difference, largest
from jobkit.errors import Exit
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import STRATEGIES
from support import zero1
from support.refusals import refusal

pytestmark = pytest.mark.usefixtures("fork_server")
ALL = [case.strategy for case in CASES]
# Numbers of ranks, and the cases there: all of them at two, else what only a larger group can show.
CORE = {1: ("dp",), 3: ("ddp", "fsdp", "pp 1f1b"), 4: ("fsdp hybrid", "pp x ddp")}
HOOKS = {"fp16": (1e-4, 2e-2), "bf16": (1e-3, 1e-1), "powersgd": (1e-2, 0.5)}


def named(label: str) -> Case:
    (case,) = (case for case in CASES if case.variant.label == label)
    return case


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_float64_differs_by_rounding_alone(every: bool) -> None:
    worlds = (1, 2, 3, 4)
    plans = {n: [c for c in cases_of(ALL, n) if c.variant.within is None] for n in worlds}
    if not every:
        plans |= {world: [named(label) for label in labels] for world, labels in CORE.items()}
    found = start.verify(plans, dtypes=("float64",))
    assert len(found) == sum(map(len, plans.values())) > (60 if every else 20)
    for each in found:
        assert each.dtype == "float64" and each.ok, each
        assert max(each.loss, each.gradient, each.parameter) < 1e-9, each
        assert each.evaluation == 0, each  # every sample once, and the same answers
    at_two = {each.case.strategy for each in found if each.world_size == 2}
    assert at_two == set(STRATEGIES) - {"single", "dp"}


@pytest.mark.parametrize("world", [2, 3])
def test_a_strategy_that_shards_the_optimizer_alone(monkeypatch, world: int) -> None:
    """By the hooks of Strategy, and nothing else of the payload."""
    zero1.register(monkeypatch)
    cases = [Case("zero1", variant) for variant in zero1.Zero1Facts.verified]
    found = start.verify({world: cases}, zero1.Known(), dtypes=("float64",))
    assert len(found) == 2 and all(each.ok for each in found), found


def test_float32_and_the_hooks_are_within_their_tolerances() -> None:
    """A hook compresses: its gradients are off by more than rounding."""
    labels = ["ddp", *(f"ddp {hook} hook" for hook in HOOKS)]
    found = start.verify({2: [named(label) for label in labels]}, dtypes=("float32",))
    plain, *hooks = found
    assert 0 < max(plain.loss, plain.gradient, plain.parameter) < plain.tolerance < 5e-4
    for each, (least, most) in zip(hooks, HOOKS.values(), strict=True):
        assert each.ok and least < each.gradient and each.tolerance == most, each


def no_zero_grad(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def unweighted(trainer: Trainer) -> None:
    """Each rank takes the mean over its own samples; the ranks' mean is taken of those."""
    add = trainer.strategy.forward_backward
    trainer.strategy.forward_backward = lambda images, labels, weight, last: add(  # type: ignore
        images, labels, 1 / max(len(labels), 1), last
    )


def parameters_apart(trainer: Trainer) -> None:
    """Rank 1 is off after the very last step: no other rank can show it."""
    step, left = trainer.strategy.optimizer_step, [trainer.spec.epochs * len(trainer.batches)]

    def stepping(optimizer: torch.optim.Optimizer) -> None:
        left[0] -= 1
        if dist.get_rank() == 1 and left[0] == 0:
            with torch.no_grad():
                next(trainer.strategy.model.parameters()).mul_(1.001)
        step(optimizer)

    trainer.strategy.optimizer_step = stepping  # type: ignore[method-assign]


def evaluates_twice(trainer: Trainer) -> None:
    trainer.strategy.data_rank = 0


FAULTS: list[tuple[Callable[[Trainer], None], str]] = [
    (no_zero_grad, "ddp"),
    (no_zero_grad, "pp 1f1b"),
    (unweighted, "ddp"),
    (parameters_apart, "ddp"),
    (evaluates_twice, "ddp"),
]


def in_turn(trainer: Trainer) -> None:
    """Of the faults that this process, a rank, has left."""
    FAULTS.pop(0)[0](trainer)


def test_an_injected_fault_is_found() -> None:
    cases = [named(label) for _, label in FAULTS]
    found = start.verify({2: cases}, in_turn, dtypes=("float64",))
    for (inject, _), each in zip(FAULTS, found, strict=True):
        assert not each.ok, inject
        if inject is evaluates_twice:
            assert each.evaluation > 0 and each.gradient < 1e-9
        else:
            assert max(each.gradient, each.parameter) > 1e-4, inject


def breaks(trainer: Trainer) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more")
    dist.barrier()  # the other waits for it


def test_a_rank_that_fails_ends_the_check_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match="ddp, 2 ranks: ValueError: no more"):
        start.verify({2: [named("ddp")]}, breaks, dtypes=("float64",))


def test_a_difference_is_the_largest_and_nan_is_none() -> None:
    right = [{"w": torch.tensor([1.0, -4.0])}, {"w": torch.zeros(2)}]
    off = [{"w": torch.tensor([1.0, -4.2])}, {"w": torch.zeros(2)}]
    assert largest(right, right) == 0 and largest(off, right) == pytest.approx(0.05)
    nan = [{"w": torch.tensor([float("nan"), -4.0])}, {"w": torch.zeros(2)}]
    assert math.isnan(largest(nan, right))
    assert largest([{"w": right[0]["w"], "b": torch.zeros(1)}], right[:1]) == math.inf


NEAR = Difference(named("ddp"), 2, "float64", 0.0, 1e-12, 0.0, 0.0)


@pytest.mark.parametrize("change", [{"loss": 2e-8}, {"gradient": float("nan")}, {"evaluation": 1}])
def test_one_over_its_tolerance_ends_with_4(change, monkeypatch, capsys) -> None:
    found = [NEAR]
    monkeypatch.setattr(start, "verify", verify := Mock(return_value=found))
    assert cli.main(["--strategies", "dp", "--world-sizes", "1", "3"]) == Exit.OK
    assert verify.call_args.args == ({1: [named("dp")], 3: []},)
    assert "all are within it" in capsys.readouterr().out
    found.append(dataclasses.replace(NEAR, **change))
    assert cli.main([]) == Exit.THRESHOLD
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines()[1:3]] == ["ok", "OVER"]
    assert "1 of 2 over the tolerance" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--strategies", "dpp"], "invalid choice: 'dpp' (choose from"),
        (["--world-sizes", "0"], "'0': must be a whole number, 1 or more, at most 16"),
        (["--strategies", "dp", "--world-sizes", "2"], "dp: no case runs on that many ranks"),
        (["--model", "cnn"], "--model cnn: must be package.module:factory"),
        (["--model", "no_such_module:Model"], "No module named 'no_such_module'"),
        (["--classes", "5"], "--device and --classes are of --model"),
    ],
)
def test_what_cannot_be_checked(words, line, capsys) -> None:
    assert line in refusal(cli.main, words, capsys)


OWN_MODEL = """
import torch
from torch import nn

class Model(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(
            nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
            nn.Flatten(), nn.Linear(256, num_classes),
        )

class Single(Model):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return super().forward(x)
"""


@pytest.mark.parametrize(
    ("name", "dtypes"), [("Model", ["float64", "float32"]), ("Single", ["float32"])]
)
def test_a_model_of_ones_own(name, dtypes, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "verified_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    words = ["--model", f"verified_model:{name}", "--device", "cpu", "--strategies", "ddp"]
    if name == "Single":
        words += ["--classes", "5"]
    assert cli.main(words) == Exit.OK
    out, said = capsys.readouterr()
    near = {"float64": "1.5e-08", "float32": "3.5e-04"}  # roots of eps
    rows = [line.split() for line in out.splitlines()[1:-2]]
    assert [(w[1], w[2], *w[-2:]) for w in rows] == [("2", d, near[d], "ok") for d in dtypes]
    assert "BatchNorm2d, Dropout compute as in an evaluation" in said
    assert ("float32 only" in said) == (name == "Single")
