"""How the submission of what Slurm did not take ends, and what is told and cancelled then."""

import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from jobkit.errors import Exit
from jobkit.launch import cancel, launcher, lock
from jobkit.launch.follow import foreground, view
from jobkit.launch.launcher import Launch
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import commands
from jobkit.launch.slurm.rest import Rest
from jobkit.launch.states import States
from jobkit.paths import write_json
from support.fake_study import make_plan, whole_run
from support.limited_slurm import RUNS, SBATCH, Clock, failed, free, job_of, taken


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


@pytest.mark.parametrize(
    ("why", "lost"),
    [
        ("Unable to contact slurm controller (connect failure)", False),
        ("Socket timed out on send/recv operation", False),
        ("Socket timed out on send/recv operation", True),
        ("Invalid feature specification", False),
    ],
)
def test_a_try_that_slurm_does_not_answer_is_made_again(
    why: str, lost: bool, slurm: Path, started: tuple[Rest, States]
) -> None:
    """But not where it may have taken the job all the same: squeue shows one that nobody noted.

    Job 98 is that of a study of the same name in another folder.
    """
    rest, states = started
    for run_id in taken(started):
        whole_run(states.plan, run_id)
    states.look()
    with lock.held(states.plan.paths):  # another launcher
        assert rest.go_on(states) == "" and len(rest.left) == 2
    says = f"sbatch: error: Batch job submission failed: {why}"
    (slurm / "sbatch").write_text(f"#!/bin/sh\ncat > /dev/null; echo '{says}' >&2; exit 1\n")
    said = rest.go_on(states)
    if "feature" in why:
        assert "Invalid feature" in said and rest.left == ()
        return
    assert said == "" and len(rest.left) == 2
    (slurm / "sbatch").write_text(SBATCH)
    free(slurm, 9)
    if "timed out" in why:
        assert rest.go_on(states) == "" and len(rest.left) == 2  # squeue does not answer either
    (slurm / "queue").write_text("1\n2\n98\n" + "99\n" * lost)
    says = "case $4 in 98) echo JobId=98 StdOut=/other/s/.submitit/0/98_0_log.out State=R;; esac"
    (slurm / "scontrol").write_text(f"#!/bin/sh\n{says}\n")  # of 99 nothing
    (slurm / "scontrol").chmod(0o755)
    said = rest.go_on(states)
    if lost:
        assert said.startswith("2 runs are not submitted: Slurm did not answer, and job 99 may")
    else:
        assert said == "2 more runs are submitted"
    assert rest.left == ()


def test_a_study_that_is_cancelled_between_two_arrays_submits_no_more(
    slurm: Path, clock: Clock
) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=RUNS)
    stamp = f"echo now > '{plan.paths.cancelled}'"
    (slurm / "sbatch").write_text(
        SBATCH.replace("echo $left > free", f"{stamp}; echo $left > free")
    )
    free(slurm, 4)  # not all five in one array
    states = States(plan, ask=False)
    states.look()
    rest = Rest(plan, Site(name="here"), LaunchRequest())
    said = "3 runs were not submitted: the study was cancelled"
    assert rest.submit(list(plan.runs), states) == said
    assert rest.runs is not None and rest.runs.masters == ["1"]
    whole_run(plan, taken((rest, states))[0])
    states.look()
    assert rest.go_on(states) == said.replace("were", "are")
    assert rest.left == () and (slurm / "count").read_text() == "1\n"


def test_a_call_without_an_answer_ends_no_array_that_was_submitted(
    slurm: Path, started: tuple[Rest, States]
) -> None:
    rest, states = started
    for run_id in taken(started):
        whole_run(states.plan, run_id)
    states.look()
    free(slurm, 1)  # one of the two: then the controller is away
    away = "sbatch: error: Batch job submission failed: Unable to contact slurm controller"
    text = SBATCH.replace("echo $left > free", f"cat > sbatch << END\n#!/bin/sh\ncat > /dev/null\n"
                          f"echo '{away}' >&2; exit 1\nEND\necho $left > free")  # fmt: skip
    (slurm / "sbatch").write_text(text)
    (slurm / "scancel").write_text('#!/bin/sh\necho "$@" >> cancelled\n')
    (slurm / "scancel").chmod(0o755)
    assert rest.go_on(states) == "1 more runs are submitted, 1 are left"
    assert not (slurm / "cancelled").exists()


def test_cancel_ends_a_launcher_that_has_only_the_rest_left(
    slurm: Path, started: tuple[Rest, States], capsys: pytest.CaptureFixture[str]
) -> None:
    (rest, states), left = started, started[0].left
    for run_id in taken(started):
        whole_run(states.plan, run_id)
    states.look()
    assert cancel.main(["s"]) == Exit.OK
    free(slurm, 9)
    assert rest.go_on(states) == "2 runs are not submitted: the study was cancelled"
    assert rest.left == ()
    again = Rest(states.plan, Site(name="here"), LaunchRequest())  # a launch after the cancel
    free(slurm, 1)
    states.look()
    again.submit(left, states)
    whole_run(states.plan, next(run_id for run_id in left if run_id not in again.left))
    states.look()
    free(slurm, 9)
    assert again.go_on(states) == "1 more runs are submitted"


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


def test_to_wait_for_a_launch_pauses_as_the_view_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at thousands of runs takes a second of a login node."""
    slept: list[float] = []
    moments, answers = iter([0.0, 1.5, 1.5, 1.6, 1.6]), iter([True, True, False])
    fake = SimpleNamespace(monotonic=lambda: next(moments), sleep=slept.append)
    monkeypatch.setattr(launcher, "time", fake)
    waited = SimpleNamespace(running=lambda: next(answers), states=dict)
    assert Launch.wait(waited) == {}
    assert slept == [7.5, pytest.approx(0.5)]


def test_to_cancel_no_job_calls_nothing(slurm: Path) -> None:
    """A filter without a job would cancel every job of the user that waits."""
    (slurm / "scancel").write_text('#!/bin/sh\necho "$@" >> cancelled\n')
    (slurm / "scancel").chmod(0o755)
    commands.cancel([])
    assert not (slurm / "cancelled").exists()
    commands.cancel(["7"])
    assert (slurm / "cancelled").read_text() == "--state=PENDING 7\n7\n"
