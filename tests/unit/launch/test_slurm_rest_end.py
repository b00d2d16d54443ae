"""How the submission of what Slurm did not take ends, and what is told and cancelled then."""

import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from jobkit.errors import Exit
from jobkit.launch import lock
from jobkit.launch.follow import foreground, view
from jobkit.launch.launcher import Launch
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import commands
from jobkit.launch.slurm.rest import Rest
from jobkit.launch.states import States
from jobkit.paths import write_json
from support.fake_study import whole_run
from support.limited_slurm import Clock, failed, free, job_of, taken


@pytest.mark.parametrize("by", ["slurm", "slurm, of an earlier launch", "itself"])
def test_only_a_job_that_slurm_cancelled_ends_the_rest(
    by: str, slurm: Path, started: tuple[Rest, States]
) -> None:
    """It is asked again before runs are submitted: the cancel may have come since the last look."""
    rest, run_ids = started[0], taken(started)
    states = States(started[1].plan)
    for run_id in run_ids[1:]:
        whole_run(states.plan, run_id)
    job = job_of(states, run_ids[0])
    (slurm / "queue").write_text(f"{job}|RUNNING|0:01|n|None\n")
    assert states.look()[run_ids[0]].status == "running"
    if "earlier" in by:
        left, rest = rest.left, Rest(states.plan, Site(name="here"), LaunchRequest())
        rest.submit(left, states)
        assert rest.left == left
    failed(states, run_ids[0], Exit.TERMINATED)
    word = "FAILED" if by == "itself" else "CANCELLED"
    (slurm / "queue").write_text(f"{job}|{word}|0:01|n|None\n")
    free(slurm, 9)
    said = rest.go_on(states)
    assert states.found[run_ids[0]].status == "cancelled"
    assert rest.left == ()
    if by == "itself":
        assert said == "2 more runs are submitted"
    else:
        assert said == "2 runs are not submitted: others were cancelled"


def test_a_run_that_another_launcher_started_is_not_submitted(
    slurm: Path, started: tuple[Rest, States]
) -> None:
    """It failed there, which its own launcher tells."""
    rest, states = started
    other = rest.left[0]
    write_json(states.plan.paths.run(other).submission, {"job_id": "99", "first_attempt": 0})
    failed(states, other, 1)
    whole_run(states.plan, taken(started)[0])
    states.look()
    assert states.found[other].status == "failed"
    free(slurm, 9)
    assert rest.go_on(states) == "1 more runs are submitted"
    assert job_of(states, other) == "99"


def test_a_failure_that_may_leave_a_job_is_not_tried_again(
    slurm: Path, started: tuple[Rest, States]
) -> None:
    rest, states = started
    whole_run(states.plan, taken(started)[0])
    states.look()
    with lock.held(states.plan.paths):  # another launcher
        assert rest.go_on(states) == "" and len(rest.left) == 2
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    (slurm / "sbatch").write_text(f"#!/bin/sh\ncat > /dev/null; echo '{said}' >&2; exit 1\n")
    note = rest.go_on(states)
    assert note.startswith("2 runs are not submitted: Slurm's controller does not answer")
    assert rest.left == ()


def test_slurm_is_asked_at_its_rate_while_something_is_left(
    started: tuple[Rest, States], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, plan = started[0], started[1].plan
    for run_id in taken(started):
        whole_run(plan, run_id)
    launch = Launch(plan=plan, run_ids=list(plan.runs), site=None, runs=rest.runs, rest=rest)
    clock.step = 0.0
    assert launch.running()  # a try, which Slurm refuses
    looks: list[bool] = []
    look = States.look

    def noted(states: States, fresh: bool = False) -> object:
        looks.append(fresh)
        return look(states, fresh)

    monkeypatch.setattr(States, "look", noted)
    assert launch.running() and launch.running()
    assert looks == [False, False]


def test_an_interrupt_says_how_the_rest_is_submitted(
    started: tuple[Rest, States],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rest, plan = started[0], started[1].plan
    here = Site(name="here")
    launch = Launch(plan=plan, run_ids=list(plan.runs), site=here, runs=rest.runs, rest=rest)

    def interrupted(_view: object) -> object:
        raise foreground.Interrupted(signal.SIGINT)

    monkeypatch.setattr(foreground, "_SIGNALS", ())  # those of the tests stay as they are
    monkeypatch.setattr(foreground.View, "follow", interrupted)
    assert foreground.Foreground(launch).follow() == Exit.INTERRUPTED
    said = " ".join(capsys.readouterr().out.split())
    assert "the same command again, which submits the other 2 runs" in said


def test_a_look_that_takes_long_is_followed_by_a_short_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have submitted jobs, which says nothing of the next one."""
    slept: list[float] = []
    moments, answers = iter([0.0, 0.0, 100.0, 100.0, 101.0]), iter([True, False])
    fake = SimpleNamespace(monotonic=lambda: next(moments), sleep=slept.append)
    monkeypatch.setattr(view, "time", fake)
    launch = SimpleNamespace(
        running=lambda: next(answers), states=dict, run_ids=[], notes=[], plan=None
    )
    view.View(launch, Console(file=io.StringIO())).follow()
    assert slept == [10.0]


def test_to_cancel_no_job_calls_nothing(slurm: Path) -> None:
    """A filter without a job would cancel every job of the user that waits."""
    (slurm / "scancel").write_text('#!/bin/sh\necho "$@" >> cancelled\n')
    (slurm / "scancel").chmod(0o755)
    commands.cancel([])
    assert not (slurm / "cancelled").exists()
    commands.cancel(["7"])
    assert (slurm / "cancelled").read_text() == "--state=PENDING 7\n7\n"
