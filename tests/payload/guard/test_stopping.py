"""Signals: all ranks stop at the same iteration, with a checkpoint, and say so."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jobkit.errors import Exit
from jobkit.paths import RunPaths, read_json
from support.cuts import PER_EPOCH, RUN, actions, final, kept, same, write_models
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

def at_start():
    os.kill(os.getpid(), signal.SIGUSR2)
    return plain()

def at_start_of_one():
    return at_start() if os.environ["RANK"] == "1" else plain()

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


@pytest.mark.parametrize(
    ("kind", "words"), [("usr2", ()), ("term", ()), ("usr1", ("--stop-signal", "USR1"))]
)
def test_a_signal_to_one_rank_stops_all(
    forge: Start, own: Path, kind: str, words: tuple[str, ...]
) -> None:
    fault = {"JOBKIT_FAULT": f"{kind}@8:1"}
    done = forge(3, *HOW, *words, "--strategy", "fsdp", cwd=str(own), env=fault)
    stopped(done, kind.upper(), range(8, 11))


def test_a_signal_to_every_rank_while_it_starts_is_not_lost(forge: Start, own: Path) -> None:
    stopped(forge(2, *RUN, "--model", "telling:at_start", cwd=str(own)), "USR2", range(1, 4))
    one = forge(2, *RUN, "--model", "telling:at_start_of_one", cwd=str(own))
    stopped(one, "USR2", range(1, 4))


def test_a_signal_in_an_evaluation_is_not_lost(forge: Start, own: Path) -> None:
    done = forge(2, *RUN, "--model", "telling:in_evaluation", cwd=str(own))
    stopped(done, "USR2", range(PER_EPOCH, PER_EPOCH + 4))


def test_a_signal_in_the_last_evaluation_comes_too_late(forge: Start, own: Path) -> None:
    done = forge(2, *RUN, "--model", "telling:in_last_evaluation", cwd=str(own))
    assert done.codes == [0, 0], done.out
    assert done.outcome
    assert (done.outcome["status"], done.outcome["exit_code"]) == ("ok", 0)
    assert kept(done) == []


def test_stopped_and_resumed_is_never_stopped(forge: Start, own: Path) -> None:
    how = (*RUN, "--model", "own_models:noisy")
    straight = forge(2, *how, "--checkpoint-every", "epoch", cwd=str(own))
    done = forge(2, *how, cwd=str(own), env={"JOBKIT_FAULT": "usr2@5"})  # the epoch's last but one
    stopped(done, "USR2", range(5, 9))
    words = ("--attempt", "1", "--checkpoint-every", "epoch")
    again = forge(2, *how, *words, run_dir=done.paths.folder, cwd=str(own))
    assert again.codes == [0, 0]
    assert same(final(straight), final(again)) == []


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
