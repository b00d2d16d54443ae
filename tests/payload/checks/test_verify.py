"""Every strategy computes what one process does, and the check of that would notice if not."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from jobkit.checks.verify import cli, start
from jobkit.checks.verify.cases import CASES, Case, chosen
from jobkit.checks.verify.rank import Difference
from jobkit.errors import Exit
from jobkit.payload.train import Trainer

pytestmark = pytest.mark.usefixtures("fork_server")
CORE = (
    *("ddp", "ddp zero1", "ddp accumulate, clip", "fsdp", "fsdp hybrid", "fsdp accumulate, clip"),
    *("mp accumulate, clip", "pp gpipe", "pp 1f1b", "pp interleaved", "pp accumulate, clip"),
    *("pp x ddp", "single", "dp"),
)
SINGLE = ("ddp", "fsdp", "pp 1f1b", "ddp fp16 hook", "ddp bf16 hook", "ddp powersgd hook")
ALL = [case.strategy for case in CASES]
WORLDS = (1, 2, 3, 4)
PLANNED = [(case.label, world) for world in WORLDS for case in chosen(ALL, world)]


def named(label: str) -> Case:
    (case,) = (case for case in CASES if case.label == label)
    return case


@functools.cache
def differences(dtype: str, worlds: tuple[int, ...], labels: tuple[str, ...]) -> Any:
    plans = {w: [c for c in chosen(ALL, w) if c.label in labels] for w in worlds}
    return {(d.case, d.world_size): d for d in start.verify(plans, dtypes=(dtype,))}


@pytest.mark.parametrize(("label", "world"), [p for p in PLANNED if p[0] in CORE])
def test_float64_differs_by_rounding_alone(label: str, world: int) -> None:
    found = differences("float64", WORLDS, CORE)[label, world]
    assert max(found.loss, found.gradient, found.parameter) < 1e-9
    assert found.evaluation == 0  # every sample once, and the same answers
    assert found.ok


def test_the_settings_that_change_no_result_change_none() -> None:
    """What the core leaves out, on two ranks."""
    rest = tuple(case.label for case in CASES if case.exact and case.label not in CORE)
    found = differences("float64", (2,), rest)
    assert len(found) >= 7
    assert [d.case for d in found.values() if not d.ok] == []


def test_float32_is_within_its_tolerance() -> None:
    for label in SINGLE[:3]:
        found = differences("float32", (2,), SINGLE)[label, 2]
        for off in (found.loss, found.gradient, found.parameter):
            assert 0 < off < found.tolerance == 5e-4


@pytest.mark.parametrize(
    ("hook", "least", "most"),
    [("fp16", 1e-4, 2e-2), ("bf16", 1e-3, 1e-1), ("powersgd", 1e-2, 0.5)],
)
def test_a_hook_compresses_within_its_tolerance(hook: str, least: float, most: float) -> None:
    found = differences("float32", (2,), SINGLE)[f"ddp {hook} hook", 2]
    assert found.tolerance == most
    assert found.ok
    assert found.gradient > least  # it did compress


def left_out(trainer: Trainer) -> None:
    """Rank 1's gradients never reach the others."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if dist.get_rank() == 1:
            bucket.buffer().zero_()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())

    trainer.strategy.model.register_comm_hook(None, hook)  # type: ignore[operator]


def no_zero_grad(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


def not_reshuffled(trainer: Trainer) -> None:
    first = trainer.batches.epoch
    trainer.batches.epoch = lambda _, *rest: first(0, *rest)  # type: ignore[method-assign]


def unweighted(trainer: Trainer) -> None:
    """Each rank takes the mean over its own samples; the ranks' mean is taken of those."""
    add = trainer.strategy.forward_backward

    def adding(
        images: torch.Tensor, labels: torch.Tensor, weight: float, last: bool
    ) -> torch.Tensor:
        return add(images, labels, 1 / max(len(labels), 1), last)

    trainer.strategy.forward_backward = adding  # type: ignore[method-assign]


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


def keeps_its_part(trainer: Trainer) -> None:
    """Not a fault: raises where a rank has more of the optimizer's state than its part."""
    step, optimizer = trainer.strategy.optimizer_step, trainer.optimizer
    whole = sum(p.numel() for p in trainer.strategy.model.parameters())

    def stepping(given: torch.optim.Optimizer) -> None:
        step(given)
        held = sum(p.numel() for p in optimizer.optim.state)  # type: ignore[attr-defined]
        if not 0.3 * whole < held < 0.7 * whole:
            raise AssertionError(f"the state of {held} of {whole} parameters")

    trainer.strategy.optimizer_step = stepping  # type: ignore[method-assign]


FAULTS: list[tuple[Callable[[Trainer], None], str]] = [
    (left_out, "ddp"),
    (no_zero_grad, "ddp"),
    (no_zero_grad, "pp 1f1b"),
    (not_reshuffled, "fsdp"),
    (unweighted, "ddp"),
    (parameters_apart, "ddp"),
    (evaluates_twice, "ddp"),
    (keeps_its_part, "ddp zero1"),
]


@dataclasses.dataclass
class InTurn:
    """One fault for each trainer, so that one pair of ranks goes through all of them."""

    left: list[Callable[[Trainer], None]]

    def __call__(self, trainer: Trainer) -> None:
        self.left.pop(0)(trainer)


@pytest.fixture(scope="module")
def injected() -> dict[tuple[Any, str], Difference]:
    """What verify finds of each fault."""
    cases = [named(label) for _, label in FAULTS]
    in_turn = InTurn([fault for fault, _ in FAULTS])
    found = start.verify({2: cases}, in_turn, dtypes=("float64",))
    return dict(zip(FAULTS, found, strict=True))


@pytest.mark.parametrize(("inject", "label"), FAULTS[:-1])
def test_an_injected_fault_is_found(injected: Any, inject: Any, label: str) -> None:
    found = injected[inject, label]
    assert found.case == label and not found.ok
    if inject is evaluates_twice:
        assert found.evaluation > 0
        assert found.gradient < 1e-9
    else:
        assert max(found.gradient, found.parameter) > 1e-4


def test_zero1_leaves_each_rank_its_part_of_the_state(injected: Any) -> None:
    assert injected[FAULTS[-1]].ok


def breaks(trainer: Trainer) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more")
    dist.barrier()


def test_a_rank_that_fails_ends_the_check_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ddp, 2 ranks: .*no more"):
        start.verify({2: [named("ddp")]}, breaks, dtypes=("float64",))


NEAR = Difference("ddp", "ddp", 2, "float64", 0.0, 1e-12, 0.0, 0.0, 1e-9, True)


@pytest.mark.parametrize("change", [{"loss": 2e-9}, {"gradient": float("nan")}, {"evaluation": 1}])
def test_one_over_its_tolerance_ends_with_4(
    change: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [NEAR]
    monkeypatch.setattr(start, "verify", lambda plans: found)
    assert cli.main([]) == Exit.OK
    assert "all are within it" in capsys.readouterr().out
    found.append(dataclasses.replace(NEAR, **change))
    assert cli.main([]) == Exit.THRESHOLD
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines()[1:3]] == ["ok", "OVER"]
    assert "1 of 2 over the tolerance" in out


def test_the_command_checks_and_says_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--strategies", "dp", "--world-sizes", "1", "3", "--json"]) == Exit.OK
    rows = json.loads(capsys.readouterr().out)
    assert [(r["case"], r["world_size"], r["dtype"], r["ok"]) for r in rows] == [
        ("dp", 1, "float64", True),
        ("dp", 1, "float32", True),
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--strategies", "dpp"], "unknown strategy 'dpp'; did you mean"),
        (["--world-sizes", "0"], "each must be from 1 to 16"),
        (["--strategies", "dp", "--world-sizes", "2"], "dp: no case runs on that many ranks"),
        (["--model", "cnn"], "--model cnn: must be package.module:factory"),
        (["--model", "no_such_module:Model"], "No module named 'no_such_module'"),
        (["--device", "cpu"], "--device: without --model the check is on the CPU"),
        (["--classes", "5"], "--classes has no effect without --model"),
        (["--global-batch-size", "48"], "--global-batch-size has no effect without --model"),
        (["--model", "a:b", "--strategies", "dpp"], "unknown strategy 'dpp'"),
    ],
)
def test_what_cannot_be_checked(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == Exit.USAGE
    assert line in capsys.readouterr().err


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
        return super().forward(x.float() if x.dtype == torch.float32 else self.refuse())

    def refuse(self):
        raise TypeError("float32 only")
"""


@pytest.mark.parametrize(
    ("name", "dtypes"), [("Model", ["float64", "float32"]), ("Single", ["float32"])]
)
def test_a_model_of_ones_own(
    name: str,
    dtypes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "verified_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    words = ["--model", f"verified_model:{name}", "--device", "cpu", "--strategies", "ddp"]
    if name == "Single":  # with other settings than the defaults
        words += ["--global-batch-size", "8", "--classes", "5", "--lr", "0.002"]
    assert cli.main([*words, "--json"]) == Exit.OK
    out, said = capsys.readouterr()
    rows = json.loads(out)
    assert [(r["dtype"], r["world_size"], r["ok"]) for r in rows] == [(d, 2, True) for d in dtypes]
    assert [r["tolerance"] for r in rows] == [
        torch.finfo(getattr(torch, d)).eps ** 0.5 for d in dtypes
    ]
    assert "BatchNorm2d, Dropout compute as in an evaluation" in said
    assert ("float32 only" in said) == (name == "Single")
