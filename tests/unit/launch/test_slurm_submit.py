"""What reaches sbatch, and what a submission leaves on disk, with a fake sbatch."""

import errno
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from jobkit.errors import Exit, UsageError
from jobkit.launch import slurm_cluster, task
from jobkit.launch import slurm_submit as submit
from jobkit.launch import view as foreground
from jobkit.launch.cli import main
from jobkit.launch.command import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm_cluster import max_array_size
from jobkit.launch.slurm_options import Batch, make_batches
from jobkit.outcome.state import RunState, run_state
from jobkit.paths import RunPaths, read_json
from jobkit.spec.study import Study
from support.place import script as executable

# Notes its words, its environment and what it reads; the ids count from 7. Refuses a job for which
# no place is left: the file free has how many elements of arrays there is room for.
SBATCH = r"""#!/usr/bin/env bash
number=$(($(cat count 2>/dev/null || echo 6) + 1)); echo $number > count
echo "$@" > $number.words; env -0 > $number.env; cat > $number.script
last=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\).*/\1/p' $number.script)
left=$(($(cat free) - ${last:-0} - 1))
[ $left -lt 0 ] && { echo "sbatch: error: Batch job submission failed: $(cat why)" >&2; exit 1; }
echo $left > free; echo "$number;cluster"
"""
LIMIT = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
SECRET = "s3cr3t-of-the-user"
# Inside mpirun, srun or torchrun each run would take itself for one of its ranks.
OUTER = "SLURM_NTASKS SBATCH_QOS SRUN_DEBUG SCANCEL_CTLD SINFO_FORMAT TORCHELASTIC_RUN_ID RANK "
OUTER += "SUBMITIT_EXECUTOR PMI_RANK PMIX_RANK OMPI_MCA_btl LOCAL_RANK WORLD_SIZE MASTER_ADDR "
OUTER += "MASTER_PORT SBATCH_PARTITION SLURM_JOB_ID"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a fake sbatch leaves what it was given; nothing else is on PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    executable(folder / "sbatch", SBATCH)
    executable(folder / "scancel", '#!/bin/sh\necho "$@" >> cancelled\n')
    executable(folder / "squeue", "#!/bin/sh\ncat queue\n")
    limit(folder, 1000)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    for name in OUTER.split():
        monkeypatch.setenv(name, "of-another-job")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("MY_RANK", "1")
    return folder


def limit(slurm: Path, places: int, why: str = LIMIT) -> None:
    (slurm / "free").write_text(f"{places}\n")
    (slurm / "why").write_text(why)


class Given:
    """A saved plan, and what of it is to be submitted."""

    def __init__(self, repeats: int = 3) -> None:
        self.plan = Study(name="s", strategies=("ddp",), gpus=(1, 2), repeats=repeats).expand()
        self.plan.save()
        self.batches = self.batches_of(list(self.plan.runs))
        self.order = [run_id for batch in self.batches for run_id in batch.run_ids]

    def batches_of(self, run_ids: Sequence[str]) -> list[Batch]:
        return make_batches(self.plan, run_ids, Site(name="here"), LaunchRequest())

    def submit(self, run_ids: Sequence[str] = ()) -> tuple[list[str], tuple[str, ...], str]:
        batches = self.batches_of(run_ids or self.order)
        return submit.submit(self.plan, batches, Site(name="here"))

    def submission(self, run_id: str) -> dict[str, Any] | None:
        return read_json(self.plan.paths.run(run_id).submission)


def environment(slurm: Path, job_id: str) -> dict[str, str]:
    pairs = (slurm / f"{job_id}.env").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def test_an_array_for_each_shape_with_the_script_that_a_dry_run_prints(slurm: Path) -> None:
    given = Given()
    assert given.submit() == (["7", "8"], (), "")
    for job_id, batch in zip(["7", "8"], given.batches, strict=True):
        text = submit.script(batch, given.plan.paths.submitit / "0")
        assert "#SBATCH --array=0-2%3\n" in text
        assert (slurm / f"{job_id}.script").read_text() == text
        assert (slurm / f"{job_id}.words").read_text() == "--parsable\n"
        for index, run_id in enumerate(batch.run_ids):
            assert given.plan.paths.run(run_id).script.read_text() == text
            assert (given.submission(run_id) or {})["job_id"] == f"{job_id}_{index}"


def test_sbatch_sees_no_variables_of_an_outer_job_and_nothing_of_ours_is_written(slurm) -> None:
    before = dict(os.environ)
    given = Given(repeats=2)
    jobs, _, _ = given.submit()
    assert dict(os.environ) == before
    for job_id in jobs:
        seen = environment(slurm, job_id)
        assert not {*OUTER.split()} & set(seen)
        assert (seen["WANDB_API_KEY"], seen["MY_RANK"]) == (SECRET, "1")
    files = [path for path in given.plan.paths.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_refusal_is_told_before_anything_is_submitted_and_leaves_nothing(slurm: Path) -> None:
    """That there is no place for all of an array is no refusal."""
    given = Given()
    limit(slurm, 2, "Invalid job array specification")
    with pytest.raises(UsageError, match="Invalid job array specification"):
        submit.check(given.plan.paths, given.batches)
    with pytest.raises(UsageError, match="sbatch rejected the job: Batch job submission failed"):
        given.submit()
    assert not any(map(given.submission, given.order))
    limit(slurm, 2)
    submit.check(given.plan.paths, given.batches)


def test_what_slurm_took_stays_where_the_limit_of_jobs_is_reached(slurm: Path) -> None:
    """An array for which there is too little room is cut; the rest is for the next call."""
    limit(slurm, 4)
    given = Given()
    jobs, left, note = given.submit()
    assert list(left) == given.order[4:] and len(jobs) == 2
    assert note.startswith("not submitted: 2 runs: sbatch rejected the job: ")
    assert not any(map(given.submission, left))
    assert not (slurm / "cancelled").exists()
    jobs, still, note = given.submit(left)
    assert (jobs, still) == ([], left) and note.startswith("not submitted: 2 runs: ")
    limit(slurm, 2)
    assert given.submit(left)[1:] == ((), "")


@pytest.mark.parametrize("full_disk", [False, True])
def test_another_refusal_ends_what_was_submitted(slurm: Path, monkeypatch, full_disk: bool) -> None:
    why, jobs = r"Invalid account.*; jobs 7", "7"
    if full_disk:
        why, jobs = r"No space left.*; jobs 7, 8", "7 8"
        write = Mock(side_effect=[None] * 4 + [OSError(errno.ENOSPC, "No space left on device")])
        monkeypatch.setattr(submit, "write_json", write)
    else:
        limit(slurm, 3, "Invalid account or account/partition combination specified")
    with pytest.raises(UsageError, match=f"{why} were cancelled"):
        Given().submit()
    assert (slurm / "cancelled").read_text() == f"--state=PENDING {jobs}\n{jobs}\n"
    (slurm / "cancelled").unlink()
    slurm_cluster.cancel([])  # a filter without a job would cancel every job of the user that waits
    assert not (slurm / "cancelled").exists()


def test_a_study_that_slurm_took_in_part_says_how_it_goes_on(slurm, monkeypatch, capsys) -> None:
    (slurm / "slurm.conf").write_text("ClusterName=here\n")
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    monkeypatch.setattr(submit, "check", lambda *_: None)
    words = "--site slurm --gpu-request none --strategies ddp --gpus 1 2 --repeats 3 --device cpu "
    words += "--name part"
    limit(slurm, 4)
    assert main([*words.split(), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert main([*words.split(), "--no-wait"]) == Exit.INCOMPLETE
    scripts = {path.read_text() for path in (slurm.parent / "logs" / "part").glob("*/job.sh")}
    assert len(scripts) == 2 and sum(text in shown for text in scripts) == 1  # one was cut
    said = " ".join(capsys.readouterr().out.split())
    assert "not submitted: 2 runs: " in said
    assert "then: the same command again, which submits the other 2 runs" in said
    noted = (slurm.parent / "logs" / "part").glob("*/submission.json")
    jobs = [read_json(path) or {} for path in noted]
    (slurm / "queue").write_text("".join(f"{j['job_id']}|PENDING|0:00||None\n" for j in jobs))

    limit(slurm, 3)
    monkeypatch.setattr(foreground, "Signals", list)  # those of the tests stay as they are
    monkeypatch.setattr(foreground.Foreground, "watch", lambda *_: signal.SIGINT)
    assert main(words.split()) == Exit.INTERRUPTED
    said = " ".join(capsys.readouterr().out.split())
    assert "4 pending already, 2 to start" in said, said
    assert "the jobs continue; to end them" in said and "not submitted" not in said
    assert said.endswith("logs/part (tables, figures, report)")


def test_an_array_has_as_many_elements_as_the_cluster_takes(slurm, monkeypatch) -> None:
    (slurm / "slurm.conf").write_text("ClusterName=c\nMaxArraySize=2 # small\n")
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    given = Given()
    assert [len(b.run_ids) for b in given.batches] == [2, 1, 2, 1]
    assert sorted(given.order) == sorted(given.plan.runs)
    assert given.submit()[0] == ["7", "8", "9", "10"]
    assert "#SBATCH --array=0-1%2\n" in (slurm / "9.script").read_text()
    assert "--array" not in (slurm / "10.script").read_text()
    (slurm / "slurm.conf").write_text("ClusterName=c\n")
    assert max_array_size() == 1001  # Slurm's default


# The runs of a study one after the other in one allocation.


def test_what_a_job_runs(tmp_path, monkeypatch) -> None:
    for codes, requeued, ok, bad, started in (
        ({"a": 0, "b": 75, "c": 0}, 0, "", 1, "ab"),  # b has requeued the job
        ({"a": 0, "b": 75, "c": 0}, 1, "a", 1, "b"),  # what is done is done
        ({"a": 137, "b": 2, "c": 0}, 0, "", 2, "abc"),  # the next one has its turn
        ({"a": 0, "b": 0}, 0, "a", 0, "ab"),  # in its first start a job runs what was ok before
    ):
        run = Mock(side_effect=lambda folder, *_, c=codes: (c[folder.name], False))
        status = {name: RunState(status="ok" if name in ok else "preempted") for name in codes}
        monkeypatch.setattr(task, "_run", run)
        monkeypatch.setattr(task, "Signals", lambda: None)
        monkeypatch.setattr(task, "run_state", lambda paths, s=status: s[paths.folder.name])
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeued))
        assert task.sweep_in_job([(str(tmp_path / name), ["true"]) for name in codes], 60) == bad
        assert "".join(call.args[0].name for call in run.call_args_list) == started


def test_no_run_of_a_shared_job_takes_the_time_of_the_others(tmp_path, monkeypatch) -> None:
    waits = SimpleNamespace(wait=lambda _: time.sleep(0.1) or [])
    monkeypatch.setattr(task, "Signals", lambda: waits)
    words = {"a": ["sleep", "600"], "b": ["sh", "-c", "sleep 1; echo done"]}  # the last has it all
    assert task.sweep_in_job([(str(tmp_path / name), words[name]) for name in words], 0.5) == 1
    assert RunPaths(tmp_path / "b").log.read_text() == "done\n"
    paths = RunPaths(tmp_path / "a")
    assert "DUE TO TIME LIMIT of a run" in paths.log.read_text()
    (paths.attempts / "0").mkdir(parents=True)
    assert run_state(paths).status == "timeout"
