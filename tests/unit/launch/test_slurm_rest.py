"""A study that is larger than the number of jobs that may be submitted, with a fake sbatch."""

from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch.launcher import Launch
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import rest as rest_module
from jobkit.launch.slurm import submit
from jobkit.launch.slurm.options import submission
from jobkit.launch.slurm.rest import Rest
from jobkit.launch.states import States
from support.fake_study import make_plan, whole_run

# Takes an array where all its elements are free: the file free has how many. The ids count from 1.
SBATCH = """#!/usr/bin/env bash
script=$(cat)
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' <<< "$script")
left=$(($(cat free) - ${last:-0} - 1))
if [ $left -lt 0 ]; then
  echo "sbatch: error: Batch job submission failed: Job violates policy (job submit limit)" >&2
  exit 1
fi
[ "$1" = --test-only ] && exit
echo $left > free; number=$(($(cat count 2>/dev/null) + 1)); echo $number > count
echo "$script" > $number.script; echo $number
"""
RUNS = 5


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake sbatch, and of what it is given."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    silent = "#!/bin/sh\nexit 1\n"
    for name, text in {"sbatch": SBATCH, "squeue": silent, "sacct": silent}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(folder / "none"))
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setattr(rest_module, "AGAIN_S", 0.0)
    return folder


@pytest.fixture
def started(slurm: Path) -> tuple[Rest, States]:
    """A study of which Slurm took three runs of five."""
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=RUNS)
    free(slurm, 3)
    states = States(plan, ask=False)
    states.look()
    rest = Rest(plan, Site(name="here"), LaunchRequest())
    note = rest.submit(list(plan.runs), states)
    assert note.startswith("2 runs were not submitted: sbatch rejected the job: ")
    return rest, states


def free(slurm: Path, number: int) -> None:
    (slurm / "free").write_text(f"{number}\n")


def collectors(slurm: Path) -> list[str]:
    """The scripts of jobs that collect."""
    texts = [path.read_text() for path in slurm.glob("*.script")]
    return [text for text in texts if "--job-name=s-collect" in text]


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


@pytest.mark.parametrize("why", ["full of others", "cancelled"])
def test_it_ends_where_waiting_would_not_help(
    why: str,
    slurm: Path,
    started: tuple[Rest, States],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest, states = started
    for run_id in (r for r in states.plan.runs if r not in rest.left):
        whole_run(states.plan, run_id)
        if why == "cancelled":
            states.plan.paths.run(run_id).outcome(0).unlink()
            states.plan.paths.run(run_id).metrics(0).unlink()
            line = "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026 ***\n"
            states.plan.paths.run(run_id).log.write_text(line)
    states.look()
    if why == "cancelled":
        free(slurm, 9)
    else:
        assert rest.go_on(states) == ""  # Slurm may count jobs that have just ended
        assert len(rest.left) == 2
        monkeypatch.setattr(rest_module, "GIVE_UP_S", 0.0)
    said = rest.go_on(states)
    wanted = "others were cancelled" if why == "cancelled" else "job submit limit"
    assert said.startswith("2 runs ") and wanted in said
    assert rest.left == ()


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
