"""Where the time of an iteration goes, what is timed, and that measuring changes nothing."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobkit.analysis.collect.why import breakdown
from jobkit.analysis.tables.frames import Row
from jobkit.payload.clock import StepWindows
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec
from support.cuts import final, same
from support.records import records_of
from support.rigs import Result, Start

SLEEP_S = 0.5  # much longer than an iteration of the small model, and than this machine's noise
RUN = [
    *("--dataset", "synthetic", "--train-samples", "512", "--test-samples", "64", "--epochs", "1"),
    *("--global-batch-size", "32", "--warmup-iterations", "2", "--why", "5"),
]
# A user's model. Where the environment says so, rank 1 is late for the all-reduce of each step.
SLOW = """
import os, time
from torch import nn

late_s = float(os.environ.get("SLEEP_S", 0)) * (os.environ["RANK"] == "1")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.1)
        self.layer = nn.Linear(3072, 10)

    def forward(self, x):
        time.sleep(late_s * self.training)
        return self.layer(self.drop(self.norm(x)).flatten(1))
"""


def run(forge: Start, own: Path, ranks: int, *words: str, **env: str) -> Result:
    (own / "slow_model.py").write_text(SLOW)
    return forge(ranks, *RUN, "--model", "slow_model:Model", *words, cwd=own, env=env)


def causes(done: Result) -> Row:
    """The breakdown that the profiled steps of all ranks say."""
    files = sorted(done.paths.metrics_folder.glob("0.w*.jsonl"))
    return breakdown(record for path in files for record in records_of(path))


def test_the_rank_that_is_late_is_named(forge: Start, own: Path) -> None:
    found = causes(run(forge, own, 2, "--strategy", "ddp", SLEEP_S=str(SLEEP_S)))
    assert (found["late_rank"], found["late_cause"]) == (1, "host")
    assert found["late_s"] == pytest.approx(SLEEP_S, rel=0.15)
    assert max(found["compute_s"], found["data_wait_s"]) < 0.15 * SLEEP_S, found


@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "ddp"),
        ("--strategy", "fsdp", "--precision", "bf16", "--accumulate", "2"),
        pytest.param(("--strategy", "pp"), marks=pytest.mark.long),
    ],
)
def test_measuring_leaves_no_trace_in_the_training(forge, own, words) -> None:
    finals, timed = [], []
    for steps in ("5", "0"):
        done = run(forge, own, 2, *words, "--why", steps, "--checkpoint-every", "epoch")
        assert ("compute_s" in causes(done)) is (steps != "0")
        trace = done.paths.folder / "traces" / "why.rank0.json.gz"
        assert trace.exists() is (steps != "0")
        assert len(done.records("difference")) == (steps != "0" and "ddp" in words)
        finals.append((final(done), done.losses()))
        timed.append(done.record("epoch")["timed_images"])
    (measured, losses), (plain, plain_losses) = finals
    assert same(measured, plain) == [] and losses == plain_losses
    assert timed == [(16 - 2 - 7) * 32, (16 - 2) * 32]  # the profiled ones are not in the rate


@pytest.mark.parametrize(
    ("device", "compiles", "benchmark", "excluded"),
    [("cpu", True, False, 1), ("cuda", False, True, 1), ("cuda", False, False, 0),
     ("cpu", False, True, 0)],
)  # fmt: skip
def test_the_first_iteration_of_a_batch_size_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, device: str, compiles: bool, benchmark: bool, excluded: int
) -> None:
    """The model is compiled for it, or cuDNN tries its kernels; that of all is in the warm-up."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    windows = StepWindows(Reporter(None, 0, 0), RankEnv(), 1)
    trainer: Any = SimpleNamespace(spec=RunSpec(compile=compiles), windows=windows, _seen=set())
    trainer.data, trainer.begun = SimpleNamespace(device=torch.device(device)), False
    windows.start(warmup=0, why=0)
    windows.begin_epoch(0)
    for size in (512, 512, 7, 7):
        Trainer._leave_out(trainer, SimpleNamespace(global_count=size))  # type: ignore[arg-type]
        now[0] += 1
        windows.waited(1)
        windows.step(size)
        trainer.begun = True
    windows.end_epoch(0.0, 1038, 4.0)
    assert windows.epoch_s == windows.wait_s == 4 - excluded
    assert windows.images == 1038 - 7 * excluded


@pytest.mark.parametrize("writes", [True, False])
def test_an_epoch_without_a_counted_step_keeps_its_time(monkeypatch, writes) -> None:
    """And where its rank cannot open a file of records."""
    now = [0.0]
    if not writes:
        monkeypatch.setattr(Reporter, "rank_writer", lambda *_: Path("/").read_bytes())
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    windows = StepWindows(Reporter(None, 0, 0), RankEnv(), 1)
    windows.start(warmup=1, why=2)  # place 6: the steps 7 to 10 are aside
    times = []
    for epoch in range(6):
        windows.begin_epoch(epoch)
        begin = now[0]
        for _ in range(2):
            now[0] += 1
            windows.step(3)
            windows.pause()  # such as for a checkpoint
            now[0] += 10
            windows.resume()
        windows.end_epoch(begin, 6, 0.0)
        times.append((windows.images, windows.epoch_s))
        now[0] += 100  # an evaluation
    assert times == [(3, 1), (6, 2), (6, 2), (6, 2), (6, 2), (6, 2)]
