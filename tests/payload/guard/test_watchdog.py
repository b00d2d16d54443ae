"""A rank that hangs is told from those that wait for it, and says where it stands."""

from pathlib import Path

import pytest

from support.cuts import DATA, write_models
from support.rigs import Result, Start

# hang: the rank's own code; locked: C code that keeps Python's lock, so that no thread runs.
HANGING = """
import ctypes, os, signal, time
from jobkit.payload.guard import watchdog
from own_models import plain

def at(step, act):
    model, calls = plain(), []

    def before(module, inputs):
        calls.append(1)
        if module.training and len(calls) == step and os.environ.get("RANK") == "1":
            act()

    model.register_forward_pre_hook(before)
    return model

def dawdle():
    while True:
        time.sleep(0.05)

def hang():
    return at(9, dawdle)

def locked():
    return at(9, lambda: ctypes.PyDLL(None).sleep(600))

def told_to_end():
    watchdog.STOP_BOUND_S = 4.0  # the users' is 15 s

    def told():
        os.kill(os.getpid(), signal.SIGTERM)
        dawdle()
    return at(9, told)

def slow():
    return at(9, lambda: time.sleep(2.0))
"""
TIMEOUT_S = 16.0
HOW = (*DATA, "--epochs", "50", "--global-batch-size", "16", "--timeout-s", str(TIMEOUT_S))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("own"))
    (folder / "hanging.py").write_text(HANGING)
    return folder


def stuck(forge: Start, own: Path, *words: str, **env: str) -> Result:
    done = forge(2, *HOW, *words, cwd=str(own), env=env)
    assert None not in done.codes, done.out  # all ended by themselves
    assert 0 not in done.codes
    return done


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_hanging_between_iterations(forge: Start, own: Path, strategy: str) -> None:
    words = ("--model", "own_models:plain", "--strategy", strategy)
    done = stuck(forge, own, *words, JOBKIT_FAULT="hang@5:1")
    assert done.outcome
    assert done.outcome["status"] == "failed"
    reason = done.outcome["reason"]
    assert reason.startswith("rank 1: no progress for ")
    assert "after iteration 5; stuck in faults.py:" in reason
    assert "(inject)" in reason
    log = done.paths.rank_log(0, 1).read_text()
    assert reason in log
    assert "most recent call first" in log
    assert 'faults.py", line' in log
    assert 'watchdog.py", line' in log  # all threads are there


def test_hanging_in_a_users_model(forge: Start, own: Path) -> None:
    done = stuck(forge, own, "--model", "hanging:hang")
    assert done.outcome
    assert done.outcome["reason"].startswith("rank 1: no progress for ")
    assert "stuck in hanging.py:" in done.outcome["reason"]
    assert 'hanging.py", line' in done.paths.rank_log(0, 1).read_text()


def test_a_rank_whose_interpreter_is_locked(forge: Start, own: Path) -> None:
    done = stuck(forge, own, "--model", "hanging:locked")
    log = done.paths.rank_log(0, 1).read_text()
    assert "Timeout (0:00:" in log
    assert 'hanging.py", line' in log
    assert done.outcome
    assert done.outcome["status"] == "failed"


def test_a_rank_that_hangs_when_it_is_told_to_end_is_not_waited_for(
    forge: Start, own: Path
) -> None:
    """Not for --timeout-s: the scheduler kills soon, and nothing would be said."""
    words = (*DATA, "--epochs", "50", "--global-batch-size", "16", "--timeout-s", "600")
    done = forge(2, *words, "--model", "hanging:told_to_end", cwd=str(own))
    assert None not in done.codes and 0 not in done.codes, done.out
    assert done.outcome
    reason = done.outcome["reason"]
    assert reason.startswith("rank 1: no progress for ") and "hanging.py:" in reason
    assert float(reason.split()[5]) < 60


def test_slow_is_not_stuck(forge: Start, own: Path) -> None:
    few = (*DATA, "--epochs", "3", "--global-batch-size", "16", "--timeout-s", str(TIMEOUT_S))
    done = forge(2, *few, "--model", "hanging:slow", cwd=str(own))
    assert done.codes == [0, 0], done.out
    assert "no progress" not in done.out
