"""Signals stop all ranks at one iteration; ranks that differ are named."""

import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from jobkit.errors import Exit, RanksDiffer
from jobkit.paths import RunPaths, read_json
from jobkit.payload import stop as stop_module
from jobkit.payload.same_ranks import checksums, compare_ranks
from jobkit.payload.stop import JobGuard
from jobkit.spec.runspec import RunSpec
from support.cuts import PER_EPOCH, RUN, actions, kept
from support.rigs import ROOT, SMALL, Start, environment

MAIN = (sys.executable, "-m", "jobkit.payload.main")
# A model that has its rank sent a warning, at its start or in one of its evaluations.
WARNED = """
import os, signal
from jobkit.payload.train import Trainer
from own_models import plain

evaluate, calls = Trainer.evaluate, []

def warn(where):
    if os.environ["WARN"] == where:
        warning = signal.SIGUSR1 if where.startswith("rank") else signal.SIGUSR2
        os.kill(os.getpid(), warning)

def evaluate_warned(self):
    calls.append(1)
    warn(f"evaluation {len(calls)}")
    return evaluate(self)

def model():
    Trainer.evaluate = evaluate_warned
    warn(f"rank {os.environ['RANK']}")
    return plain()
"""


@pytest.fixture(scope="module")
def warned(own: Path) -> Path:
    (own / "warned.py").write_text(WARNED)
    return own


@pytest.mark.parametrize(
    ("ranks", "fault", "warn", "name", "at"),
    [
        (3, "term@8:1", "", "TERM", range(8, 11)),
        (2, "", "rank 1", "USR1", range(1, 4)),
        (2, "", "evaluation 1", "USR2", range(PER_EPOCH, PER_EPOCH + 4)),
    ],
)
def test_a_signal_to_one_rank_stops_all(forge, warned, ranks, fault, warn, name, at) -> None:
    words = (*RUN, "--model", "warned:model", "--strategy", "fsdp", "--check-ranks", "5")
    done = forge(ranks, *words, cwd=warned, env={"JOBKIT_FAULT": fault, "WARN": warn})
    (saved,) = [iteration for action, iteration in actions(done) if action == "saved"]
    assert saved in at and kept(done) == [f"{saved:08d}-0"]
    outcome, end = done.outcome or {}, done.record("run_end")
    assert (outcome["status"], outcome["exit_code"]) == ("preempted", Exit.AGAIN)
    assert outcome["reason"] == f"SIG{name} after iteration {saved}, checkpoint saved"
    assert (end["status"], end["reason"]) == ("preempted", outcome["reason"])
    assert f"there are none, under strategy fsdp at {ranks} ranks" in done.out


def test_a_signal_in_the_last_evaluation_comes_too_late(forge: Start, warned: Path) -> None:
    words = (*RUN, "--model", "warned:model")
    done = forge(2, *words, cwd=warned, env={"WARN": "evaluation 4"})
    outcome = done.outcome or {}
    assert (outcome["status"], outcome["exit_code"], kept(done)) == ("ok", 0, [])


def test_term_while_it_starts_ends_at_once(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    env = environment(PYTHONPATH=str(ROOT / "src"), JOBKIT_DATA_DIR=str(tmp_path))
    process = subprocess.Popen([*MAIN, *SMALL, "--run-dir", str(run.folder)], env=env)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)  # it is importing torch, which takes longer
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == -signal.SIGTERM
    assert read_json(run.outcome(0)) is None


def test_a_signal_before_the_ranks_listen_waits_for_them(tmp_path: Path) -> None:
    words = ["bash", str(ROOT / "run.sh"), "--nproc-per-node", "2", *SMALL, "--run-dir", "run"]
    env = environment(JOBKIT_PYTHON=sys.executable, JOBKIT_DATA_DIR=str(tmp_path))
    process = subprocess.Popen([*words, "--epochs", "500"], env=env, cwd=tmp_path)
    try:
        while not (tmp_path / "run" / "attempts" / "0").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(100) == Exit.AGAIN
    finally:
        process.terminate()


WORLD = 3


class Lockstep:
    """all_reduce of ranks that are called one after the other: done once the last has called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.waiting = 0, list[torch.Tensor]()
        monkeypatch.setattr(dist, "get_world_size", lambda _: WORLD)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor: torch.Tensor, *_: object, **__: object) -> SimpleNamespace:
        self.calls += 1
        self.waiting.append(tensor)
        if len(self.waiting) == WORLD:
            largest = torch.stack(self.waiting).amax(0)
            for request in self.waiting:
                request.copy_(largest)
            self.waiting = []
        return SimpleNamespace(wait=lambda: None)


def trainer_at(steps: int, epoch: int) -> SimpleNamespace:
    """A training of so many steps, in epochs of some, before its first one."""
    trainer = SimpleNamespace(progress=SimpleNamespace(iteration=0))
    trainer.windows = SimpleNamespace(pause=lambda: None, resume=lambda: None)
    trainer.group = SimpleNamespace(gather=lambda name: ["", "SIGUSR2", ""])

    def step() -> None:
        trainer.progress.iteration += 1
        trainer.finished = trainer.progress.iteration == steps
        trainer.epoch_over = trainer.progress.iteration % epoch == 0 or trainer.finished

    trainer.step, trainer.total_steps = step, steps
    return trainer


@pytest.mark.parametrize(
    ("device", "steps", "epoch", "told", "stopped"),
    [
        ("cpu", 100, 100, 42, 43),
        ("cuda", 1000, 1000, 42, 60),  # the second agreement after it
        ("cuda", 64, 64, 25, 27),  # a short training agrees more often
        ("cuda", 1000, 47, 45, 47),  # at the end of an epoch at once
        ("cuda", 9, 3, 7, 8),
        ("cuda", 12, 12, 1, 2),
    ],
)
def test_when_the_ranks_stop(monkeypatch, device, steps, epoch, told, stopped) -> None:
    """At one iteration; on GPUs not more than an eighth of the steps left later."""
    group, trainer = Lockstep(monkeypatch), trainer_at(steps, epoch)
    stops = [SimpleNamespace(signal="") for _ in range(WORLD)]
    guards = [JobGuard(RunSpec(), group=None, stop=stop, device=device) for stop in stops]  # type: ignore[arg-type]
    monkeypatch.setattr(JobGuard, "_act", lambda self, _, request: acted.append(request))
    at: list[int] = []
    while trainer.progress.iteration != steps and not at:
        trainer.step()
        if trainer.progress.iteration == told:
            stops[1].signal = "SIGUSR2"
        acted: list[int] = []
        for guard in guards:
            guard.edge(trainer)  # type: ignore[arg-type]
        # At the end of an epoch the last rank's request completes the sum that all wait for.
        if trainer.epoch_over and not trainer.finished:
            acted = [int(guard._request) for guard in guards]
        if stop_module._STOP in acted:
            assert acted == [stop_module._STOP] * WORLD
            at.append(trainer.progress.iteration)
    assert at == [stopped]
    if device == "cuda":
        assert group.calls < WORLD * max(8 * 3, steps / 5)


FLIPS = """
import os, torch
from own_models import plain

step, calls = torch.optim.SGD.step, []

def flipping(self, *args, **kwargs):
    step(self, *args, **kwargs)
    calls.append(1)
    if len(calls) == 7 and os.environ["RANK"] == "1":  # as a fault of the memory would, once
        self.param_groups[0]["params"][2].data[0, 0] += 0.5

torch.optim.SGD.step = flipping
"""


def test_the_rank_that_differs_is_named(forge: Start, own: Path) -> None:
    (own / "flips.py").write_text(FLIPS)
    done = forge(2, *RUN, "--check-ranks", "5", "--model", "flips:plain", cwd=own, code=4)
    assert "[rank1] --check-ranks: after iteration 10 rank 1 has" in done.out
    assert "Traceback" not in done.out
    outcome = done.outcome or {}
    assert outcome["exit_code"] == 4
    other = "after iteration 10 rank 1 has other parameters than rank 0, 2.weight first"
    assert other in outcome["reason"]


def test_the_first_rank_that_differs() -> None:
    parameters = {"a": torch.zeros(1), "b": torch.zeros(1)}
    trainer: Any = SimpleNamespace(progress=SimpleNamespace(iteration=6))
    trainer.strategy = SimpleNamespace(named_parameters=lambda: parameters)
    for every, ranks, line in (
        (3, [(7, 1)] * 4, ""),
        (4, [(7, 1), (7, 2)], ""),  # not compared after iteration 6
        (3, [(7, 1), (7, 1), (8, 1), (9, 1)], "rank 2 has other parameters than rank 0, a first"),
        (3, [(6, 1), (7, 1), (7, 1)], "rank 0 has other parameters than rank 1, a"),  # most differ
        (3, [(7, 1), (7, 2)], "rank 1 has other parameters than rank 0, b first"),
    ):
        trainer.group = SimpleNamespace(gather=lambda sums, ranks=ranks: ranks)
        trainer.spec = RunSpec(check_ranks=every)
        with pytest.raises(RanksDiffer, match=line) if line else nullcontext():
            compare_ranks(trainer, cast("Any", None))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_bit_changes_a_checksum_and_the_memory_format_does_not(dtype: torch.dtype) -> None:
    plain = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    last, other = plain.to(memory_format=torch.channels_last), plain.clone()
    other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])[1, 2, 3, 4] ^= 1
    first, second, third = checksums([plain, last, other])
    assert first == second != third


def test_a_checkpoint_that_several_ranks_wish_for_is_written_once(monkeypatch) -> None:
    """What they agree on is read one iteration later: the next wish is of the same moment."""
    Lockstep(monkeypatch)
    trainer, saved = trainer_at(20, 20), [list[int]() for _ in range(WORLD)]
    guards = []
    for mine in saved:
        checkpoints = SimpleNamespace(begun=-1, begun_s=time.monotonic())

        def save(_: object, mine: list[int] = mine, own: Any = checkpoints) -> bool:
            own.begun, own.begun_s = trainer.progress.iteration, time.monotonic()
            mine.append(own.begun)
            return True

        checkpoints.save = save
        how: Any = {"checkpoints": checkpoints, "stop": SimpleNamespace(signal="")}
        guards.append(JobGuard(RunSpec(checkpoint_every="1000s"), group=None, **how))
    for iteration in range(1, 13):
        trainer.step()
        for rank, guard in enumerate(guards):
            # The clock of one rank is an iteration late.
            if iteration in (3 + (rank == 2), 9):
                guard._checkpoints.begun_s -= 2000
            guard.edge(trainer)
    assert saved == [[4, 10]] * WORLD
