"""Signals stop all ranks at one iteration; ranks that differ are named."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from jobkit.errors import Exit, RanksDiffer
from jobkit.paths import RunPaths, read_json
from jobkit.payload import leaving
from jobkit.payload.guard import consensus
from jobkit.payload.guard.consensus import Consensus, JobGuard, Pace
from jobkit.payload.guard.same_ranks import checksums, first_apart
from support.cuts import PER_EPOCH, RUN, actions, kept, write_models
from support.rigs import ROOT, SMALL, Result, Start, environment

# What sends a signal to itself where it is told to, and what starts a child of its own.
TELLING = """
import os, signal, subprocess
from jobkit.payload.train import Trainer
from own_models import plain

def warn_in_evaluation(number):
    told, calls = Trainer.evaluate, []
    def evaluate(self):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGUSR2)
        return told(self)
    Trainer.evaluate = evaluate

def in_evaluation():
    warn_in_evaluation(1)
    return plain()

def in_last_evaluation():
    warn_in_evaluation(4)
    return plain()

def at_start_of_one():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGUSR2)
    return plain()

child = None

def with_child():
    global child
    child = child or subprocess.Popen(["sleep", "60"])
    model, passes = plain(), []
    def before(module, inputs):
        passes.append(1)
        if len(passes) == 5:
            child.send_signal(signal.SIGUSR2)
            try:
                print("the child ended with", child.wait(0.5), flush=True)
            except subprocess.TimeoutExpired:
                print("the child lives", flush=True)
            child.kill()
    model.register_forward_pre_hook(before)
    return model
"""
HOW = (*RUN, "--model", "own_models:plain")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("own"))
    (folder / "telling.py").write_text(TELLING)
    return folder


def stopped(done: Result, name: str, at: range) -> int:
    """Where all ranks stopped, the checkpoint saved and all of it told."""
    assert set(done.codes) == {0}, done.out
    (saved,) = [iteration for action, iteration in actions(done) if action == "saved"]
    assert saved in at
    assert kept(done) == [f"{saved:08d}-0"]
    assert done.outcome
    assert (done.outcome["status"], done.outcome["exit_code"]) == ("preempted", Exit.AGAIN)
    assert done.outcome["reason"] == f"SIG{name} after iteration {saved}, checkpoint saved"
    end = done.record("run_end")
    assert (end["status"], end["reason"]) == ("preempted", done.outcome["reason"])
    return saved


@pytest.mark.parametrize(("kind", "words"), [("term", ()), ("usr1", ("--stop-signal", "USR1"))])
def test_a_signal_to_one_rank_stops_all(
    forge: Start, own: Path, kind: str, words: tuple[str, ...]
) -> None:
    fault = {"JOBKIT_FAULT": f"{kind}@8:1"}
    done = forge(3, *HOW, *words, "--strategy", "fsdp", cwd=str(own), env=fault)
    stopped(done, kind.upper(), range(8, 11))


@pytest.mark.parametrize(
    ("model", "at"),
    [
        ("at_start_of_one", range(1, 4)),
        ("in_evaluation", range(PER_EPOCH, PER_EPOCH + 4)),
    ],
)
def test_a_signal_at_another_time_is_not_lost(
    forge: Start, own: Path, model: str, at: range
) -> None:
    done = forge(2, *RUN, "--model", f"telling:{model}", cwd=str(own))
    stopped(done, "USR2", at)


def test_a_signal_in_the_last_evaluation_comes_too_late(forge: Start, own: Path) -> None:
    done = forge(2, *RUN, "--model", "telling:in_last_evaluation", cwd=str(own))
    assert done.codes == [0, 0], done.out
    assert done.outcome
    assert (done.outcome["status"], done.outcome["exit_code"]) == ("ok", 0)
    assert kept(done) == []


def test_a_child_of_the_training_does_not_die_of_the_warning(forge: Start, own: Path) -> None:
    done = forge(1, *RUN, "--model", "telling:with_child", cwd=str(own))
    assert "the child lives" in done.out


def test_without_a_folder_the_code_says_it(own: Path) -> None:
    words = [*HOW, "--strategy", "single", "--data-dir", str(own)]
    done = subprocess.run(
        [sys.executable, "-m", "jobkit.payload.main", *words],
        env=environment(PYTHONPATH=f"{ROOT / 'src'}", JOBKIT_FAULT="usr2@3"),
        cwd=own,
    )
    assert done.returncode == Exit.AGAIN


def test_term_while_it_starts_ends_at_once(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "jobkit.payload.main", *SMALL, "--run-dir", str(run.folder)],
        env=environment(PYTHONPATH=str(ROOT / "src"), JOBKIT_DATA_DIR=str(tmp_path)),
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)  # it is importing torch, which takes longer
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == -signal.SIGTERM
    assert read_json(run.outcome(0)) is None


def test_a_forked_child_tells_nobody_and_ends() -> None:
    """Such as a worker that multiprocessing ends with TERM."""
    program = textwrap.dedent("""
        import os, signal, time
        from jobkit.payload.guard.stopping import StopRequest
        stop = StopRequest()
        stop.listen("USR2")
        stop.listen_to_all()
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"x")
            time.sleep(600)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.2)
        assert stop.signal == "", stop.signal
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 100
        while not stop.signal and time.monotonic() < end:
            time.sleep(0.01)
        assert stop.signal == "SIGTERM", stop.signal
    """)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WORLD = 3


class Lockstep:
    """all_reduce of ranks that are called one after the other: done once the last has called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.waiting, self.rank = 0, [], 0
        monkeypatch.setattr(dist, "get_world_size", lambda _: WORLD)
        monkeypatch.setattr(dist, "get_rank", lambda _: self.rank)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def ranks(self, pace: Pace | None) -> list[Consensus]:
        made = []
        for self.rank in range(WORLD):
            made.append(Consensus(None, pace))  # type: ignore[arg-type]
        return made

    def all_reduce(self, tensor: torch.Tensor, *_: object, **__: object) -> SimpleNamespace:
        self.calls += 1
        self.waiting.append(tensor)
        if len(self.waiting) == WORLD:
            largest = torch.stack(self.waiting).amax(0)
            for each in self.waiting:
                each.copy_(largest)
            self.waiting = []
        return SimpleNamespace(wait=lambda: None)


class Ten(Pace):
    """Proposes ten after the fifth iteration."""

    def proposal(self, iteration: int) -> int:
        return 10 * (iteration == 5)


@pytest.mark.parametrize(("pace", "calls", "stop"), [(None, 100, 43), (Ten(None), 6 + 10, 60)])
def test_how_often_and_where(
    monkeypatch: pytest.MonkeyPatch, pace: Pace | None, calls: int, stop: int
) -> None:
    group = Lockstep(monkeypatch)
    ranks, acted = group.ranks(pace), []
    for iteration in range(1, 101):
        for rank, each in enumerate(ranks):
            asked = consensus._STOP if rank == 1 and iteration >= 42 else consensus._NOTHING
            if each.agree(asked) == consensus._STOP:
                acted.append((iteration, rank))
    assert [first for first in acted if first[0] == acted[0][0]] == [
        (stop, r) for r in range(WORLD)
    ]
    assert group.calls == WORLD * calls


def test_the_interval_comes_from_the_measured_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.0099])  # two iterations of 5 ms
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(consensus, "time", SimpleNamespace(monotonic=lambda: next(now)))
    pace = Pace(torch.device("cuda", 0))
    assert [pace.proposal(i) for i in range(1, 8)] == [0, 0, 0, 0, 10, 0, 0]
    # On a CPU the ranks agree after every iteration.
    assert [Pace(torch.device("cpu")).proposal(i) for i in range(1, 8)] == [0] * 7


FLIPS = """
import os, torch
from torch import nn

STEP, calls = torch.optim.SGD.step, []

def step(self, *args, **kwargs):
    STEP(self, *args, **kwargs)
    calls.append(1)
    if len(calls) == 7 and os.environ["RANK"] == "1":  # as a fault of the memory would, once
        weight = self.param_groups[0]["params"][2]
        getattr(weight, "_local_tensor", weight).data[0, 0] += 0.5

torch.optim.SGD.step = step

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3072, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.second(self.first(x.flatten(1)).relu())
"""
FLIP_RUN = (*SMALL, "--epochs", "1", "--global-batch-size", "32", "--warmup-iterations", "1")
FLIP_RUN += ("--model", "flips:Model", "--check-ranks", "5")


@pytest.mark.parametrize(
    "words",
    [
        ("ddp",),
        pytest.param(("fsdp", "--fsdp-hybrid-replicas", "2"), marks=pytest.mark.long),
    ],
)
def test_the_rank_that_differs_is_named(
    forge: Start, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "flips.py").write_text(FLIPS)
    done = forge(2, *FLIP_RUN, "--strategy", *words, cwd=str(tmp_path))
    assert done.codes == [4, 4], done.out
    assert done.outcome is not None
    assert done.outcome["exit_code"] == 4
    assert "after iteration 10 rank 1 has other parameters than rank 0" in done.outcome["reason"]
    assert "second.weight first" in done.outcome["reason"]
    assert "Traceback" not in done.out


def test_what_is_on_one_rank_only_is_not_compared(forge: Start, tmp_path: Path) -> None:
    (tmp_path / "flips.py").write_text(FLIPS)
    done = forge(2, *FLIP_RUN, "--strategy", "fsdp", cwd=str(tmp_path))
    assert done.codes == [0, 0], done.out
    assert "no parameter is on two ranks: nothing is compared" in done.out


@pytest.mark.parametrize(
    ("keys", "sums", "found"),
    [
        ("aaaa", [7, 7, 7, 7], None),
        ("aaaa", [7, 7, 8, 9], (2, 0)),
        ("aaaa", [6, 7, 7, 7], (0, 1)),  # most ranks have another
        ("aa", [7, 8], (1, 0)),
        ("abab", [7, 8, 7, 8], None),  # two stages: each differs from the other
        ("abab", [7, 8, 7, 9], (3, 1)),
        ("abcd", [1, 2, 3, 4], None),  # shards: each is on one rank only
    ],
)
def test_the_first_rank_that_differs(
    keys: str, sums: list[int], found: tuple[int, int] | None
) -> None:
    assert first_apart(list(keys), sums) == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_changes_a_checksum_and_the_memory_format_does_not(dtype: torch.dtype) -> None:
    plain = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    last = plain.to(memory_format=torch.channels_last)
    assert checksums([plain, plain]).tolist() == checksums([last, last]).tolist()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    other = plain.clone()
    other.view(bits)[1, 2, 3, 4] ^= 1
    first, second = checksums([plain, other]).tolist()
    assert first != second


def test_it_ends_with_4_in_one_line_per_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(leaving, "leave", lambda code: codes.append(code) or exit(code))
    with pytest.raises(SystemExit):
        leaving.leave_after(RanksDiffer("rank 1 differs"), 3)
    assert codes == [Exit.THRESHOLD]
    assert capsys.readouterr().err == "[rank3] rank 1 differs\n"


def test_a_checkpoint_that_several_ranks_wish_for_is_written_once() -> None:
    """What they agree on is read one iteration later: the next wish is of the same moment."""
    agreed = iter([0, consensus._SAVE, consensus._SAVE, 0, 0, 0, consensus._SAVE])
    saved: list[int] = []
    trainer = SimpleNamespace(
        progress=SimpleNamespace(iteration=0),
        epoch_over=False,
        clock=SimpleNamespace(paused=nullcontext),
    )
    checkpoints = SimpleNamespace(
        begun=-1, late=lambda: False, poll=lambda: None, due=lambda iteration: False
    )

    def save(_: object) -> None:
        checkpoints.begun = trainer.progress.iteration
        saved.append(checkpoints.begun)

    checkpoints.save = save
    guard = JobGuard(
        consensus=SimpleNamespace(agree=lambda own: next(agreed), every=1),  # type: ignore[arg-type]
        stop=SimpleNamespace(signal=""),  # type: ignore[arg-type]
        watchdog=None,
        checkpoints=checkpoints,  # type: ignore[arg-type]
        fault=None,
    )
    for trainer.progress.iteration in range(1, 8):
        guard.edge(trainer)  # type: ignore[arg-type]
    assert saved == [2, 7]
