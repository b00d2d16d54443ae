"""What reaches sbatch, and what a submission leaves on disk, with a fake sbatch."""

import ast
import os
from pathlib import Path

import pytest

from jobkit.errors import Exit, UsageError
from jobkit.launch.cli import main
from jobkit.launch.command import clean_environment
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import submit
from jobkit.launch.slurm.cluster import max_array_size
from jobkit.launch.slurm.options import Submission, submission
from jobkit.paths import read_json
from jobkit.spec.plan import Study
from support.place import ROOT

# Notes its words, its environment and what it reads; the ids count from 7.
SBATCH = """#!/usr/bin/env bash
number=$(($(cat count 2>/dev/null || echo 6) + 1)); echo $number > count
echo "$@" > $number.words; env -0 > $number.env; cat > $number.script
[ -e refuse ] && echo "sbatch: error: Batch job submission failed: no" >&2 && exit 1
echo "$number;cluster"
"""
SECRET = "s3cr3t-of-the-user"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a fake sbatch leaves what it was given; nothing else is on PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "RANK"):
        monkeypatch.setenv(name, "of-another-job")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    return folder


def wanted(repeats: int, **request: bool) -> Submission:
    study = Study(name="s", strategies=("ddp",), gpus=(1, 2), repeats=repeats)
    plan = study.expand()
    plan.save()
    return submission(plan, list(plan.runs), Site(name="here"), LaunchRequest(**request))


def environment(slurm: Path, job_id: str) -> dict[str, str]:
    pairs = (slurm / f"{job_id}.env").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def test_an_array_for_each_shape_with_the_script_that_a_dry_run_prints(slurm: Path) -> None:
    given = wanted(repeats=3)
    assert submit.submit(given) == ["7", "8"]
    for job_id, batch in zip(["7", "8"], given.batches, strict=True):
        text = submit.script(batch, given.study.submitit / "0", given.at_once)
        assert "#SBATCH --array=0-2%3\n" in text
        assert (slurm / f"{job_id}.script").read_text() == text
        assert (slurm / f"{job_id}.words").read_text() == "--parsable\n"
        for index, run_id in enumerate(batch.run_ids):
            paths = given.study.run(run_id)
            assert paths.script.read_text() == text
            assert (read_json(paths.submission) or {})["job_id"] == f"{job_id}_{index}"
            assert (given.study.submitit / "0" / f"{job_id}_{index}_submitted.pkl").exists()


@pytest.mark.parametrize("request_", [{"within_allocation": True}, {}])
def test_a_single_job_is_no_array(slurm: Path, request_: dict[str, bool]) -> None:
    given = wanted(repeats=1, **request_)
    first = submit.submit(given)[0]
    assert "--array" not in (slurm / f"{first}.script").read_text()
    assert (given.study.submitit / "0" / f"{first}_submitted.pkl").exists()


def test_sbatch_sees_no_variables_of_an_outer_job_and_ours_do_not_change(slurm: Path) -> None:
    before = dict(os.environ)
    given = wanted(repeats=1)
    masters = submit.submit(given)
    collector = submit.submit_collect(given, masters)
    assert dict(os.environ) == before
    for job_id in (*masters, collector):
        seen = environment(slurm, job_id)
        assert not {"SBATCH_PARTITION", "SLURM_JOB_ID", "RANK"} & set(seen)
        assert seen["WANDB_API_KEY"] == SECRET
    assert f"afterany:{':'.join(masters)}" in (slurm / f"{collector}.script").read_text()


@pytest.mark.parametrize(
    "name",
    [
        *("SLURM_NTASKS", "SBATCH_QOS", "SRUN_DEBUG", "SCANCEL_CTLD", "SINFO_FORMAT"),
        *("TORCHELASTIC_RUN_ID", "SUBMITIT_EXECUTOR", "PMI_RANK", "PMIX_RANK", "OMPI_MCA_btl"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ],
)
def test_a_variable_of_an_outer_job_or_launcher_reaches_no_run(name: str) -> None:
    """Inside mpirun, srun or torchrun each run would take itself for one of its ranks."""
    user = {"PATH": "/bin", "WANDB_API_KEY": SECRET, "MY_RANK": "1"}
    assert clean_environment({name: "of-another-job", **user}) == user


def test_nothing_of_the_environment_is_written(slurm: Path) -> None:
    given = wanted(repeats=2)
    submit.submit_collect(given, submit.submit(given))
    files = [path for path in given.study.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_what_refuses_an_array_is_told_before_anything_is_submitted(slurm: Path) -> None:
    """One run of each may be taken; that there is no place for all of an array is no refusal."""
    given = wanted(repeats=3)
    why = "sbatch: error: Batch job submission failed: "
    refuses = '#!/bin/bash\ntext=$(cat); [[ $text != *--array=* ]] || { echo "%s" >&2; exit 1; }\n'
    (slurm / "sbatch").write_text(refuses % f"{why}Invalid job array specification")
    with pytest.raises(UsageError, match="Invalid job array specification"):
        submit.check(given)
    (slurm / "sbatch").write_text(refuses % f"{why}Job violates policy (job submit limit)")
    submit.check(given)


def test_a_refusal_is_told_and_leaves_no_submission(slurm: Path) -> None:
    (slurm / "refuse").touch()
    given = wanted(repeats=1)
    with pytest.raises(UsageError, match="sbatch rejected the job: Batch job submission failed"):
        submit.submit(given)
    assert not any(given.study.run(r).submission.exists() for r in given.plan.runs)
    with pytest.raises(submit.CollectRefused, match="sbatch rejected the job"):
        submit.submit_collect(given, ["7"])


def test_a_script_is_made_where_there_is_no_slurm(slurm: Path, monkeypatch) -> None:
    given = wanted(repeats=1)
    monkeypatch.setenv("PATH", "/nowhere")
    text = submit.script(given.batches[0], given.study.submitit, None)
    assert text.startswith("#!/bin/bash\n")


def test_only_public_names_of_submitit_are_imported() -> None:
    for path in (ROOT / "src" / "jobkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("submitit"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not [name for name in names if name.startswith("_")], path


@pytest.mark.parametrize(
    ("request_", "asked"),
    [
        ("gpus-per-node", {"dp": ("gpus-per-node", "4"), "ddp": ("gpus-per-node", "1")}),
        ("gres", {"dp": ("gres", "gpu:4"), "ddp": ("gres", "gpu:1")}),
        ("gpus-per-task", {"dp": ("gpus-per-task", "4"), "ddp": ("gpus-per-task", "1")}),
    ],
)
def test_a_run_of_dp_requests_all_gpus_of_its_node(
    request_: str, asked: dict[str, tuple[str, str]]
) -> None:
    """It drives all that it sees; the jobs of other strategies stay as they are."""
    plan = Study(name="s", strategies=("dp", "ddp"), gpus=(1, 2)).expand()
    site = Site(name="here", gpus_per_node=4, gpu_request=request_)
    found = {}
    for batch in submission(plan, list(plan.runs), site, LaunchRequest()).batches:
        for run_id in batch.run_ids:
            spec = plan.runs[run_id]
            if spec.world_size == 1:
                found[spec.strategy] = batch.options
    for strategy, (option, value) in asked.items():
        assert found[strategy][option] == value
        assert found[strategy]["ntasks-per-node"] == "1"
    whole = submission(plan, list(plan.runs), site, LaunchRequest(within_allocation=True))
    (batch,) = whole.batches
    assert batch.options[asked["dp"][0]] == {"gpus-per-task": "2"}.get(request_, asked["dp"][1])


def test_dp_on_the_cpu_requests_no_more_than_others() -> None:
    plan = Study(name="s", strategies=("dp",), gpus=(1,), settings={"device": "cpu"}).expand()
    site = Site(name="here", gpus_per_node=4, gpu_request="gpus-per-node")
    (batch,) = submission(plan, list(plan.runs), site, LaunchRequest()).batches
    assert batch.options["gpus-per-node"] == "1"


def test_an_array_has_as_many_elements_as_the_cluster_takes(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "slurm.conf").write_text("ClusterName=c\nMaxArraySize=2 # small\n")
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    given = wanted(repeats=3)
    assert [len(b.run_ids) for b in given.batches] == [2, 1, 2, 1]
    assert sorted(r for b in given.batches for r in b.run_ids) == sorted(given.plan.runs)
    assert submit.submit(given) == ["7", "8", "9", "10"]
    assert "#SBATCH --array=0-1%2\n" in (slurm / "9.script").read_text()
    assert "--array" not in (slurm / "10.script").read_text()
    monkeypatch.setenv("SLURM_CONF", str(slurm / "none"))
    assert max_array_size() == 1001  # Slurm's default


@pytest.mark.parametrize("reason", ["job submit limit", "invalid account"])
def test_what_was_submitted_stays_where_only_the_limit_of_jobs_is_reached(
    slurm: Path, reason: str
) -> None:
    said = f"sbatch: error: Batch job submission failed: Job violates policy ({reason}, size)"
    (slurm / "sbatch").write_text(
        SBATCH.replace("[ -e refuse ]", "[ $number -gt 7 ]").replace(
            "sbatch: error: Batch job submission failed: no", said
        )
    )
    (slurm / "scancel").write_text('#!/usr/bin/env bash\necho "$@" >> cancelled\n')
    (slurm / "scancel").chmod(0o755)
    given = wanted(repeats=3)
    refused = pytest.raises(submit.LimitReached if "limit" in reason else UsageError)
    with refused as error:
        submit.submit(given)
    assert (slurm / "cancelled").exists() == ("limit" not in reason)
    second = given.batches[1].run_ids
    assert not any(given.study.run(run_id).submission.exists() for run_id in second)
    if isinstance(error.value, submit.LimitReached):
        assert error.value.masters == ["7"]
        assert str(error.value).startswith("3 runs were not submitted: sbatch rejected the job")
        assert reason in str(error.value)


def test_a_study_that_slurm_took_in_part_says_how_it_goes_on(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "sbatch: error: Batch job submission failed: Job violates policy (job submit limit)"
    refusing = SBATCH.replace("[ -e refuse ]", "[ $number -gt 8 ]")
    (slurm / "sbatch").write_text(
        refusing.replace("sbatch: error: Batch job submission failed: no", limit)
    )
    words = ["--site", "slurm", "--gpu-request", "none", "--no-wait", "--no-collect"]
    words += ["--strategies", "ddp", "--gpus", "1", "2", "--device", "cpu", "--name", "part"]
    monkeypatch.setattr(submit, "check", lambda *_: None)
    (slurm / "slurm.conf").write_text("ClusterName=here\n")
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    (slurm / "count").write_text("7\n")
    assert main(words) == Exit.INCOMPLETE
    said = " ".join(capsys.readouterr().out.split())
    assert "then: the same command again, which submits the other 3 runs" in said


def test_nothing_is_written_for_a_run_before_its_array_is_tried(slurm: Path) -> None:
    """Thousands of runs may be left, and a try be refused many times."""
    text = SBATCH.replace("submission failed: no", "submission failed: job submit limit")
    (slurm / "sbatch").write_text(text)
    (slurm / "refuse").touch()
    given = wanted(repeats=2)
    with pytest.raises(submit.LimitReached):
        submit.submit(given, full=True)
    first, second = ([given.study.run(r).site.exists() for r in b.run_ids] for b in given.batches)
    assert first == [True, True] and second == [False, False]
