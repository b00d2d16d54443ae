"""A run goes on while it is judged: whatever the moment of each look, no verdict is a lie.

A run's last writes are a list of steps. The reader is stopped at every look at a file, at a process
or at Slurm's word, and the run goes on there to any later step.
"""

import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobkit import processes
from jobkit.outcome import state
from jobkit.outcome.slurm_jobs import Job
from jobkit.outcome.state import join, run_state
from jobkit.paths import RunPaths
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun

SPEC = RunSpec(dataset="synthetic", epochs=1)
RUNNER, CHILD = 1001, 1002
LOCAL = {"launcher": "local", "job_id": None, "host": socket.gethostname()}
SLURM = {"launcher": "slurm", "job_id": "17", "host": "elsewhere"}


class Story:
    """What happens to a run, step by step, in a folder that is made anew for each reading."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root / "s" / "r")
        self.steps: list[Callable[[], object]] = []
        self.done = 0
        self.alive: set[int] = set()
        self.slurm = ""
        self.run: Any = None  # a FakeRun

    def begin(self, step: int) -> None:
        shutil.rmtree(self.paths.folder, ignore_errors=True)
        self.paths.folder.mkdir(parents=True)
        self.done, self.alive, self.slurm, self.run = 0, set(), "", None
        self.go_to(step)

    def go_to(self, step: int) -> None:
        while self.done < step:
            self.steps[self.done]()
            self.done += 1
        for path in self.paths.folder.rglob("*"):
            os.utime(path, (1e9, 1e9))  # an age must not hide a wrong order

    def job(self, kind: dict[str, object], attempt: int = 0, **more: object) -> None:
        job = {"v": 1, "pid": RUNNER, "pid_start": 7, "started": 5.0, "ended": None}
        job |= {"exit_code": None, "first_attempt": attempt, **kind, **more}
        job |= {"child": {"pid": CHILD, "pid_start": 7}}
        self.paths.job.write_text(json.dumps(job))
        if kind is LOCAL:
            self.alive = {RUNNER, CHILD} if job["ended"] is None else set()

    def submitted(self) -> None:
        record = {"launcher": "slurm", "job_id": "17", "submitted": 1.0}
        self.paths.submission.write_text(json.dumps(record))
        self.slurm = "PENDING"

    def attempt(self, number: int) -> None:
        self.run = FakeRun(self.paths.folder.parent, "r", SPEC, number)
        self.run.print(f"[jobkit] start: attempt {number}")
        self.run.flush().begin().train(0).flush()

    def has(self, what: str, status: str, reason: str, code: int) -> None:
        getattr(self.run, what)(status, reason, code)

    def child_is_gone(self) -> None:
        self.alive = {RUNNER}


def begun_again(story: Story) -> None:
    """A start by the launcher: an attempt fails and is begun again, the next one ends well."""
    story.steps += [
        lambda: story.job(LOCAL),
        lambda: story.attempt(0),
        lambda: story.has("end", "failed", "rank 0: ValueError: x", 1),
        lambda: story.attempt(1),
        lambda: story.run.writer.write("run_end", status="ok", reason="", total_time_s=3.0),
        lambda: story.has("outcome", "ok", "", 0),
        story.child_is_gone,
        lambda: story.job(LOCAL, ended=9.0, exit_code=0),
    ]


def requeued(story: Story) -> None:
    """A job on a node that cannot be asked from here: queued, run, requeued, done."""
    story.steps.append(story.submitted)
    for number, end in enumerate((("preempted", "USR2", 75), ("ok", "", 0))):
        story.steps += [
            lambda: setattr(story, "slurm", "RUNNING"),
            lambda number=number: story.job(SLURM, number),
            lambda number=number: story.attempt(number),
            lambda end=end: story.has("end", *end),
            lambda n=number, end=end: story.job(SLURM, n, ended=9.0, exit_code=end[2]),
            lambda end=end: setattr(story, "slurm", "PENDING" if end[2] else "COMPLETED"),
        ]


@pytest.mark.parametrize(
    ("tell", "allowed"),
    [
        (begun_again, {"running", "ok"}),
        (requeued, {"pending", "running", "ok"}),
    ],
)
def test_no_verdict_is_a_lie_whatever_the_moment(tell, allowed, tmp_path, monkeypatch) -> None:
    story = Story(tmp_path)
    tell(story)
    looks, going = 0, (0, 0)  # at this look of the reading, to this step

    def look() -> None:
        nonlocal looks
        if looks == going[0]:
            story.go_to(going[1])
        looks += 1

    def watch(module: object, name: str) -> None:
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *words, **more: (look(), plain(*words, **more))[1])

    def process_start(pid: int) -> int | None:
        look()
        return 7 if pid in story.alive else None

    def ask(ids: list[str]) -> dict[str, Job]:
        look()
        return {i: Job(job_id=i, state=story.slurm) for i in ids}

    for name in ("read_json", "read_tail", "file_names", "is_regular", "_mark"):
        watch(state, name)
    monkeypatch.setattr(processes, "process_start", process_start)
    seen = set()
    last = len(story.steps)
    for begin, later in itertools.combinations_with_replacement(range(1, last + 1), 2):
        at = looks = 0
        while at == 0 or (at < looks and begin < later):
            story.begin(begin)
            looks, going = 0, (at, later)
            if story.steps[0] == story.submitted:
                status = join({"r": story.paths}, (), ask)[0]["r"].status
            else:
                status = run_state(story.paths).status
            assert status in allowed, f"{status} from step {begin} to {later} at look {at}"
            if begin == last:
                assert status in allowed - {"running"}
            seen.add(status)
            at += 1
    assert seen == allowed
