"""A study that is larger than the number of jobs that may be submitted, with a fake sbatch."""

import time
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch import states as states_module
from jobkit.launch.launcher import Launch
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import rest as rest_module
from jobkit.launch.slurm import submit
from jobkit.launch.slurm.options import submission
from jobkit.launch.slurm.rest import Rest
from jobkit.launch.states import States, hold_places
from jobkit.paths import write_json
from support.fake_study import make_plan, whole_run
from support.limited_slurm import RUNS, Clock, collectors, free, job_of, taken


def test_an_array_that_is_too_large_is_cut(slurm: Path, started: tuple[Rest, States]) -> None:
    rest, states = started
    sizes = [text.count("--array=0-1") for text in (f.read_text() for f in slurm.glob("*.script"))]
    assert sorted(sizes) == [0, 1]  # one run, and two
    assert rest.runs is not None and rest.runs.masters == ["1", "2"]
    found = states.look()
    pending = [run_id for run_id, state in found.items() if state.status == "pending"]
    assert len(pending) == 3 and not {*pending} & {*rest.left}
    assert {found[run_id].status for run_id in rest.left} == {"missing"}
    assert collectors(slurm) == []  # the jobs that it would wait for are not all there


def test_what_is_left_is_submitted_as_jobs_end(slurm: Path, started: tuple[Rest, States]) -> None:
    rest, states = started
    plan, left = states.plan, rest.left
    launch = Launch(plan=plan, run_ids=list(plan.runs), site=None, runs=rest.runs, rest=rest)
    assert {launch.states()[run_id].status for run_id in left} == {"pending"}
    states.look()
    free(slurm, 9)
    assert rest.go_on(states) == ""  # nothing has ended
    assert rest.left == left
    ended = [run_id for run_id in plan.runs if run_id not in left][:2]
    for run_id in ended:
        whole_run(plan, run_id)
    states.look()
    free(slurm, 1)
    assert rest.go_on(states) == "1 more runs are submitted, 1 are left"
    states.look()
    assert rest.go_on(states) == ""
    whole_run(plan, next(r for r in plan.runs if r not in (*left, *ended)))
    states.look()
    free(slurm, 2)
    assert rest.go_on(states) == "1 more runs are submitted"
    assert rest.left == () and len(collectors(slurm)) == 1
    statuses = [state.status for state in states.look().values()]
    assert sorted(statuses) == ["ok"] * 3 + ["pending"] * 2


def test_it_ends_where_waiting_would_not_help(
    started: tuple[Rest, States], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, states = started
    for run_id in taken(started):
        whole_run(states.plan, run_id)
    states.look()
    assert rest.go_on(states) == ""  # Slurm may count jobs that have just ended
    assert len(rest.left) == 2
    monkeypatch.setattr(rest_module, "GIVE_UP_S", 0.0)
    said = rest.go_on(states)
    assert said.startswith("2 runs ") and "job submit limit" in said
    assert rest.left == ()


def test_a_refused_try_is_made_again_though_no_other_run_ends(
    slurm: Path, started: tuple[Rest, States], clock: Clock
) -> None:
    """Slurm counts a job for some time after its run has ended."""
    rest, states = started
    whole_run(states.plan, taken(started)[0])
    states.look()
    clock.step = 0.0
    assert rest.go_on(states) == "" and len(rest.left) == 2
    states.look()
    free(slurm, 9)
    clock.now += 2 * rest_module.AGAIN_S - 1
    assert rest.go_on(states) == ""  # too early
    clock.now += 1
    assert rest.go_on(states) == "1 more runs are submitted, 1 are left"
    states.look()
    clock.now += rest_module.AGAIN_S
    assert rest.go_on(states) == "1 more runs are submitted"  # though no other run has ended


def all_submitted(slurm: Path, started: tuple[Rest, States]) -> tuple[str, str]:
    """Two runs have ended and two more are submitted: what is told, and the third of the first."""
    rest, states = started
    *ended, last = taken(started)
    for run_id in ended:
        whole_run(states.plan, run_id)
    states.look()
    free(slurm, 2)
    return rest.go_on(states), last


def test_a_collect_job_without_a_place_is_told(slurm: Path, started: tuple[Rest, States]) -> None:
    rest, states = started
    said, last = all_submitted(slurm, started)
    assert said.startswith("2 more runs are submitted; the collect job was not submitted: ")
    assert rest.left == () and rest.waits and collectors(slurm) == []
    whole_run(states.plan, last)
    states.look()
    assert rest.go_on(states) == "" and rest.waits  # no place is free yet
    free(slurm, 1)
    assert rest.go_on(states) == "job 4 then collects" and not rest.waits
    active = [run_id for run_id, state in states.look().items() if state.status == "pending"]
    jobs = sorted({job_of(states, run_id).split("_")[0] for run_id in active})
    (script,) = collectors(slurm)
    assert len(active) == 2 and f"--dependency=afterany:{':'.join(jobs)}\n" in script
    # A refused try leaves no folder: those of the first jobs, of the rest, of the collect job.
    folders = list(states.plan.paths.submitit.iterdir())
    assert len(folders) == 3 and all(any(folder.iterdir()) for folder in folders)


def test_no_second_collect_job_beside_another_launcher_s(
    slurm: Path, started: tuple[Rest, States]
) -> None:
    rest, states = started
    last = all_submitted(slurm, started)[1]
    assert rest.waits
    write_json(states.plan.paths.collect_job, {"job_id": "77"})
    whole_run(states.plan, last)
    states.look()
    free(slurm, 9)
    assert rest.go_on(states) == "" and not rest.waits and collectors(slurm) == []


def test_no_place_for_the_collect_job_is_no_reason_to_wait_forever(
    slurm: Path, started: tuple[Rest, States], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, states = started
    left = rest.left
    free(slurm, 2)
    for run_id in taken(started):
        whole_run(states.plan, run_id)
    states.look()
    assert "collect job was not submitted" in rest.go_on(states)
    for run_id in left:
        whole_run(states.plan, run_id)
    states.look()
    monkeypatch.setattr(rest_module, "GIVE_UP_S", 0.0)
    assert "run ./plot_results.sh" in rest.go_on(states)
    assert not rest.waits and collectors(slurm) == []


def test_no_more_is_tried_than_runs_have_ended(slurm: Path, clock: Clock) -> None:
    """Of 40 runs that are left each other try would be cut down to one, call by call."""
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=44)
    states = States(plan, ask=False)
    states.look()
    free(slurm, 4)
    rest = Rest(plan, Site(name="here"), LaunchRequest())
    rest.submit(list(plan.runs), states)
    assert len(rest.left) == 40
    whole_run(plan, next(run_id for run_id in plan.runs if run_id not in rest.left))
    states.look()
    (slurm / "calls").unlink()
    assert rest.go_on(states) == "" and len(rest.left) == 40  # Slurm counts the job still
    assert (slurm / "calls").read_text() == "--parsable\n"
    free(slurm, 8)
    counts = []
    while free_now := int((slurm / "free").read_text()):
        states.look()
        rest.go_on(states)
        counts.append(free_now - int((slurm / "free").read_text()))
    assert counts == [1, 1, 2, 4]


def test_a_sites_lines_are_written_once(slurm: Path) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=1)
    free(slurm, 9)
    wanted = submission(plan, list(plan.runs), Site(name="here"), LaunchRequest())
    (site,) = (plan.paths.run(run_id).site for run_id in plan.runs)
    submit.submit(wanted)
    first = site.stat().st_ino
    submit.submit(wanted)
    assert site.stat().st_ino == first
    site.write_text("another site's")
    submit.submit(wanted)
    assert site.read_text() == Site(name="here").shell()


def test_a_cut_array_with_a_limit_of_runs_at_a_time_is_told(slurm: Path, clock: Clock) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=RUNS)
    free(slurm, 3)
    rest = Rest(plan, Site(name="here"), LaunchRequest(at_once=2))
    assert "--max-running applies to each job array" in rest.submit(
        list(plan.runs), States(plan, ask=False)
    )


def test_a_job_counts_for_some_time_after_its_run(
    slurm: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study that is started again then waits for its place, and does not end with an error."""
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=2)
    first, second = plan.runs
    whole_run(plan, first)
    job = {"job_id": "7", "started": time.time(), "ended": time.time()}
    write_json(plan.paths.run(first).job, job)
    states = States(plan, ask=False)
    found = states.look()
    monkeypatch.setattr(states_module, "STILL_COUNTED_S", 0.0)
    assert not hold_places(plan, found)
    free(slurm, 0)
    rest = Rest(plan, Site(name="here"), LaunchRequest())
    with pytest.raises(UsageError, match="job submit limit"):
        rest.submit([second], states)
    monkeypatch.setattr(states_module, "STILL_COUNTED_S", 1e6)
    assert hold_places(plan, found)
    rest.submit([second], states)
    assert rest.left == (second,)
    free(slurm, 1)
    assert rest.go_on(states).startswith("1 more runs are submitted")


def test_called_again_while_its_jobs_have_all_places(
    slurm: Path, started: tuple[Rest, States]
) -> None:
    plan, left = started[1].plan, started[0].left
    wanted = submission(plan, left, Site(name="here"), LaunchRequest())
    with pytest.raises(UsageError):
        submit.check(wanted)
    submit.check(wanted, full=True)
    again, states = Rest(plan, Site(name="here"), LaunchRequest()), States(plan, ask=False)
    states.look()
    again.submit(left, states)
    assert again.left == left and again.runs is not None
    assert again.runs.where == "no job: no more may be submitted now"
