"""A run goes on while it is judged: whatever the moment of each look, no verdict is a lie.

A run's last writes are a sequence of states on disk, each with the processes that live in it. The
reader is stopped at every look at a file, at a process or at Slurm's word, and the run goes on
there to any later state.
"""

import functools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jobkit import processes
from jobkit.outcome.join import join
from jobkit.outcome.slurm_jobs import Job
from jobkit.outcome.status import run_state
from jobkit.paths import RunPaths
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun

SPEC = RunSpec(dataset="synthetic", epochs=1)
RUNNER, CHILD = 1001, 1002
LONG_AGO = 1e9


class Recorded:
    """The states that a run goes through: a copy of its study's folder for each, and who lives."""

    def __init__(self, root: Path) -> None:
        self.root, self.study = root, root / "s"
        self.run = RunPaths(self.study / "r")
        self.run.folder.mkdir(parents=True)
        self.alive: list[frozenset[int]] = []
        self.slurm: list[str] = []

    def state(self, *alive: int, slurm: str = "") -> None:
        """The run is as its files say now; these processes live, and this is Slurm's word."""
        shutil.copytree(self.study, self.root / str(len(self.alive)))
        for path in (self.root / str(len(self.alive))).rglob("*"):
            os.utime(path, (LONG_AGO, LONG_AGO))  # an age must not hide a wrong order
        self.alive.append(frozenset(alive))
        self.slurm.append(slurm)

    def job(self, attempt: int = 0, child: bool = True, **more: Any) -> None:
        """Write job.json as the runner does."""
        job = {"v": 1, "launcher": "local", "job_id": None, "pid": RUNNER, "pid_start": 7}
        job |= {"host": socket.gethostname(), "started": 5.0, "ended": None, "exit_code": None}
        job |= {"child": {"pid": CHILD, "pid_start": 7}} if child else {}
        self.run.job.write_text(json.dumps(job | {"first_attempt": attempt} | more))

    def attempt(self, number: int, *alive: int, slurm: str = "") -> FakeRun:
        """An attempt begins: its folder, its log, its first records."""
        run = FakeRun(self.study, "r", SPEC, number)
        run.writer.close()
        run.paths.metrics(number).unlink()
        self.state(*alive, slurm=slurm)
        run = _reopened(run)
        run.print(f"[jobkit] start: attempt {number}")
        run.flush().begin().train(0).flush()
        self.state(*alive, slurm=slurm)
        return run


def _reopened(run: FakeRun) -> FakeRun:
    (run.paths.attempts / str(run.attempt)).rmdir()
    return FakeRun(run.paths.folder.parent, "r", SPEC, run.attempt)


def local(to: Recorded, *, first: int = 0, bad: int = 0) -> None:
    """A start by the launcher: so many attempts fail and are begun again, then one ends well."""
    to.state()
    to.job(first, child=False)
    to.state(RUNNER)
    for number in range(first, first + bad):
        to.attempt(number, RUNNER, CHILD).end("failed", "rank 0: ValueError: x", 1)
        to.state(RUNNER, CHILD)
    to.job(first)
    run = to.attempt(first + bad, RUNNER, CHILD)
    run.writer.write("run_end", status="ok", reason="", total_time_s=3.0)
    to.state(RUNNER, CHILD)
    run.outcome("ok", "", 0)
    to.state(RUNNER, CHILD)
    to.state(RUNNER)
    to.job(first, ended=9.0, exit_code=0)
    to.state()


def local_again(to: Recorded) -> None:
    """A start after one that had failed: no word of that one's counts."""
    to.attempt(0).end("failed", "rank 0: ValueError: x", 1)
    to.job(ended=4.0, exit_code=1, started=1.0)
    to.alive.clear(), to.slurm.clear()
    for made in to.root.glob("[0-9]*"):
        shutil.rmtree(made)
    local(to, first=1)


def local_cancelled(to: Recorded) -> None:
    """A run whose processes were ended, and whose end is told by the exit code alone."""
    to.job()
    to.state(RUNNER, CHILD)
    to.attempt(0, RUNNER, CHILD)
    to.state(RUNNER)
    to.job(ended=9.0, exit_code=143)
    to.state(RUNNER)
    to.state()


def on_slurm(to: Recorded, *, requeues: int = 0) -> None:
    """A job on a node that cannot be asked from here: queued, run, perhaps requeued, done."""
    record = {"launcher": "slurm", "job_id": "17", "submitted": 1.0}
    to.run.submission.write_text(json.dumps(record))
    to.state(slurm="PENDING")
    more = {"launcher": "slurm", "job_id": "17", "host": "elsewhere"}
    for number in range(requeues):
        to.job(number, **more)
        run = to.attempt(number, slurm="RUNNING")
        run.end("preempted", "SIGUSR2", 75)
        to.job(number, **more, ended=9.0, exit_code=75)
        to.state(slurm="RUNNING")
        to.state(slurm="PENDING")
    to.job(requeues, **more)
    to.attempt(requeues, slurm="RUNNING").end()
    to.state(slurm="RUNNING")
    to.job(requeues, **more, ended=9.0, exit_code=0)
    to.state(slurm="RUNNING")
    to.state(slurm="COMPLETED")


class Playing:
    """The recorded states, one after the other, under one path."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.now = recorded, 0
        self.looks: list[str] = []  # what the reader looked at, in its order
        self.bursts: Mapping[int, int] = {}
        shutil.rmtree(recorded.study)

    def begin(self, state: int, bursts: Mapping[int, int]) -> None:
        """Go to a state; at these looks of the reading that follows, to these others."""
        self.looks, self.bursts = [], bursts
        self._show(state)

    def look(self, at: str) -> None:
        """The reader is about to look at something: before it does, the run may go on."""
        state = self.bursts.get(len(self.looks))
        self.looks.append(at)
        if state is not None:
            self._show(state)

    def process_start(self, pid: int) -> int | None:
        self.look("process")
        return 7 if pid in self.recorded.alive[self.now] else None

    def ask(self, ids: Iterable[str]) -> dict[str, Job]:
        self.look("slurm")
        return {i: Job(job_id=i, state=self.recorded.slurm[self.now]) for i in ids}

    def _show(self, state: int) -> None:
        self.now = state
        link = self.recorded.root / "next"
        link.symlink_to(str(state))
        link.replace(self.recorded.study)

    def same(self, at: str, one: int, other: int) -> bool:
        """Whether a look shows the same in two states, so that it does not tell them apart."""
        return self._shown(at, one) == self._shown(at, other)

    @functools.cache  # noqa: B019  one object a test
    def _shown(self, at: str, state: int) -> object:
        if at == "process":
            return self.recorded.alive[state]
        if at == "slurm":
            return self.recorded.slurm[state]
        folder = self.recorded.root / str(state) / "r"
        if at == "names":
            return sorted(RunPaths(folder).names)
        if at in ("attempts", "metrics_folder"):
            return sorted(p.name for p in (folder / at.removesuffix("_folder")).glob("*"))
        patterns = {"outcome": "attempts/*/outcome.json", "metrics": "metrics/*"}
        pattern = patterns.get(at) or getattr(RunPaths(folder), at).name
        return [p.read_bytes() for p in sorted(folder.glob(pattern))] if at != "folder" else None


class Watched(RunPaths):
    """A run's paths; whoever makes one is about to look there."""

    playing: Playing

    def __getattribute__(self, name: str) -> Any:
        if name in LOOKED_AT:
            Watched.playing.look(name)
        return super().__getattribute__(name)


LOOKED_AT = {
    "names",
    "job",
    "submission",
    "attempts",
    "metrics_folder",
    "outcome",
    "metrics",
    "log",
}
LOOKED_AT |= {"scheduler_log", "spec"}


def verdicts(
    playing: Playing, judge: Callable[[], str], most: int
) -> Iterator[tuple[str, int, int]]:
    """The verdict of every reading, and the states at which it began and ended.

    In each the run goes on at so many looks at most. Not where the look would show the same as
    before: that is the reading in which it goes on at the next one.
    """
    last = len(playing.recorded.alive) - 1

    def goings(begin: int, bursts: dict[int, int]) -> Iterator[tuple[str, int, int]]:
        playing.begin(begin, bursts)
        yield judge(), begin, playing.now
        if len(bursts) == most:
            return
        now, looks = playing.now, playing.looks
        for number in range(max(bursts, default=-1) + 1, len(looks)):
            for later in range(now + 1, last + 1):
                if not playing.same(looks[number], now, later):
                    yield from goings(begin, {**bursts, number: later})

    for begin in range(last + 1):
        yield from goings(begin, {})


@pytest.mark.parametrize(
    ("record", "allowed", "most"),
    [
        (local, {"running", "ok"}, 2),
        (lambda to: local(to, bad=1), {"running", "ok"}, 1),  # 2 take half a minute
        (local_again, {"running", "ok"}, 2),
        (local_cancelled, {"running", "cancelled"}, 2),
        (on_slurm, {"pending", "running", "ok"}, 2),
        (lambda to: on_slurm(to, requeues=1), {"pending", "running", "ok"}, 1),
    ],
    ids=["local", "begun again", "started again", "cancelled", "slurm", "requeued"],
)
def test_no_verdict_is_a_lie_whatever_the_moment(
    record: Callable[[Recorded], None],
    allowed: set[str],
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(tmp_path)
    record(recorded)
    Watched.playing = playing = Playing(recorded)
    monkeypatch.setattr(processes, "process_start", playing.process_start)
    paths, on_cluster = Watched(recorded.run.folder), bool(recorded.slurm[0])

    def judge() -> str:
        if on_cluster:
            return join({"r": paths}, {}, playing.ask).states["r"].status
        return run_state(paths).status

    seen = set()
    for status, begin, end in verdicts(playing, judge, most):
        # Before its start a run may be missing, or what an earlier start has left it.
        fine = allowed if begin else {*allowed, "missing", "failed"}
        assert status in fine, f"{status} from state {begin} to {end}"
        assert end < len(recorded.alive) - 1 or begin != end or status in allowed - {"running"}
        seen.add(status)
    assert allowed <= seen
