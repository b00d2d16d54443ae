"""A rank that hangs writes where it stands, and no rank waits for ever."""

import faulthandler
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from jobkit.payload import run
from jobkit.payload.main import main
from jobkit.payload.stop import JobGuard
from jobkit.spec.runspec import RunSpec
from support.cuts import DATA
from support.rigs import Start

# A rank keeps Python's lock in C code, so that no thread of Python runs.
HANGING = """
import ctypes, os
from own_models import plain

def locked():
    model, calls = plain(), []

    def before(module, inputs):
        calls.append(1)
        if module.training and len(calls) == 9 and os.environ.get("RANK") == "1":
            ctypes.PyDLL(None).sleep(600)

    model.register_forward_pre_hook(before)
    return model
"""
HOW = (*DATA, "--epochs", "50", "--global-batch-size", "16", "--timeout-s", "6")


def test_every_rank_writes_its_stacks_and_the_others_end(forge: Start, own: Path) -> None:
    (own / "hanging.py").write_text(HANGING)
    words = (*HOW, "--model", "hanging:locked", "--strategy", "fsdp")
    done = forge(2, *words, cwd=own, timeout_s=20, code=None)
    # A launcher ends the rank that hangs once the other has failed: there is none here.
    assert done.codes == [1, None], done.out
    assert done.outcome and done.outcome["status"] == "failed"
    folder = done.paths.rank_log(0, 0).parent
    assert f"a rank that hung left its stacks in {folder}" in done.outcome["reason"]
    logs = [done.paths.rank_log(0, rank).read_text() for rank in (0, 1)]
    assert all("Timeout (0:00:04" in log and "most recent call first" in log for log in logs)
    assert ['hanging.py", line' in log for log in logs] == [False, True]


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """When stacks were asked for: in how many seconds, and whether the process ends then."""
    calls: list[tuple[float, bool]] = []
    later = lambda seconds, exit, file: calls.append((seconds, exit))  # noqa: E731
    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    return calls


def test_a_hang_in_the_start_ends_with_the_stacks(armed, tmp_path, monkeypatch) -> None:
    """As where NCCL looks for its peers over a network that swallows packets."""

    def join(*_: object) -> None:
        raise InterruptedError("it would wait here")

    monkeypatch.setattr(run, "join", join)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "hsn0")
    monkeypatch.setattr("jobkit.payload.main.leave", lambda code: sys.exit(code))
    folder = tmp_path / "run"
    with pytest.raises(SystemExit):
        main([*DATA, "--strategy", "single", "--timeout-s", "7", "--run-dir", str(folder)])
    assert armed == [(1.25 * 7, True)]
    assert "joining 1 ranks over hsn0" in (folder / "ranks/0/rank-0.log").read_text()


def test_when_stacks_are_due(armed, monkeypatch) -> None:
    """Before the timeout; one rank alone ends."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    spec, how = RunSpec(timeout_s=100.0), {"stop": SimpleNamespace(), "log": sys.stderr}
    for ranks, due in ((2, (80.0, False)), (1, (125.0, True))):
        monkeypatch.setattr(dist, "get_world_size", lambda _, ranks=ranks: ranks)
        guard = JobGuard(spec, group=None, **how)  # type: ignore[arg-type]
        armed.clear()
        for _ in range(5):  # not at every iteration, as each call starts a thread
            guard.alive()
        assert armed == [due]
        clock.now += 10
        guard.alive()
        assert armed == [due, due]
