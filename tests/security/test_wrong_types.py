"""Files with values of the wrong type in every field: one line, never a traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.claims.cli import main as claims
from jobkit.analysis.cli import collect_main
from jobkit.errors import UsageError
from jobkit.launch.cancel import main as cancel
from jobkit.launch.cli import main as launch
from jobkit.launch.follow.progress import progress
from jobkit.launch.follow.status import main as status
from jobkit.launch.follow.view import duration
from jobkit.launch.site import Site
from jobkit.payload.slurm_env import place
from jobkit.spec.plan import Plan
from support.fake_study import make_plan, whole_run

WRONG: list[Any] = [None, "x", -1, 1.5, 10**400, True, [[1]], {"x": 1}, "\x1b"]
LAUNCHER = ("pid", "pid_start", "host", "started", "run_ids", "at_once", "folder")
JOB = ("launcher", "job_id", "pid", "pid_start", "host", "started", "ended", "exit_code", "child")
JOB += ("first_attempt", "command", "submitted", "shared")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("PATH", "/nowhere")
    made = make_plan("s", strategies=("ddp",), gpus=(1,))
    whole_run(made, next(iter(made.runs)))
    return made


def all_commands(capsys: pytest.CaptureFixture[str], *more: Any) -> None:
    """Each command on the study ends with a documented code; a refusal is one line."""
    words = ["--study", "demo", "--name", "s", "--site", "local", "--dry-run"]
    codes = [main(["s"]) for main in (status, *more)]
    capsys.readouterr()
    codes.append(launch(words))
    said = capsys.readouterr().err
    assert set(codes) <= {0, 2, 3} and (codes[-1] == 0 or said.count("\n") == 1)


@pytest.mark.parametrize("key", LAUNCHER)
def test_launcher_json(plan: Plan, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    from jobkit.outcome.liveness import process_start

    own = {"pid": os.getpid(), "pid_start": process_start(os.getpid()), "started": 1.0}
    for value in WRONG:
        plan.paths.launcher.write_text(json.dumps({**own, "run_ids": list(plan.runs), key: value}))
        all_commands(capsys)


@pytest.mark.parametrize("key", JOB)
@pytest.mark.parametrize("name", ["job.json", "submission.json"])
def test_job_json(plan: Plan, name: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plan.paths.run(next(iter(plan.runs))).folder
    (folder / "attempts" / "0" / "outcome.json").unlink()
    (folder / "metrics" / "0.jsonl").unlink()
    good = {"launcher": "slurm", "job_id": "7", "started": 2.0, "submitted": 1.0, "pid": 1}
    (folder / "job.json").write_text(json.dumps(good))
    for value in WRONG:
        (folder / name).write_text(json.dumps({**good, key: value}))
        all_commands(capsys)


@pytest.mark.parametrize("key", ["run_id", "spec"])
def test_runs_of_a_plan(plan: Plan, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(plan.paths.plan.read_text())
    for value in WRONG:
        content["runs"] = [{"run_id": "x", "spec": {}, key: value}]
        plan.paths.plan.write_text(json.dumps(content))
        all_commands(capsys)


@pytest.mark.parametrize("key", ["lr", "epochs", "dataset", "strategy", "x"])
def test_settings_of_a_plan(plan: Plan, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(plan.paths.plan.read_text())
    for value in [*WRONG, float("nan"), float("inf")]:
        content["study"]["settings"] = {key: value}
        plan.paths.plan.write_text(json.dumps(content))
        all_commands(capsys)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "..", "-x", "a\nb", "/" + "x/" * 3000])
def test_names_of_a_study(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for main in (status, cancel, collect_main):
        with pytest.raises(SystemExit) if name == "-x" else _nothing():
            assert main([name]) == 2
            assert capsys.readouterr().err.count("\n") == 1


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


VALUES = [None, "x", [], {}, 10**400, 1e308, -1e308, float("inf"), True]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_progress_of_a_run_whose_records_are_odd(plan: Plan, value: Any) -> None:
    paths = plan.paths.run(next(iter(plan.runs)))
    for name in ("epoch_time_s", "eval_time_s", "t", "val_loss", "val_accuracy", "images_per_s"):
        with paths.metrics(1).open("w") as file:
            record = {"v": 1, "kind": "epoch", "run_id": "x", "attempt": 1, "seq": 0, "epoch": 0}
            record |= {"epoch_time_s": 1.0, "eval_time_s": 1.0, "t": 0.0, name: value}
            file.write(json.dumps(record) + "\n")
        found = progress(paths, next(iter(plan.runs.values())), 1)
        assert found.text and isinstance(duration(found.left_s) + duration(found.elapsed_s), str)


def test_a_table_of_claims_with_a_field_that_is_too_long(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "claims.csv"
    path.write_text(f"gpus,time\n1,{'9' * 200_000}\n")
    assert claims([str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["image", "python"])
def test_a_site_whose_word_would_be_an_option(name: str) -> None:
    with pytest.raises(UsageError, match="begins as an option"):
        Site(name="x", container="apptainer", **{"image": "a.sif", name: "--bind=/:/host"})


STEP = {
    "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip


@pytest.mark.parametrize("value", ["x", "", "1.5", "\x1b", "9" * 5000, None])
@pytest.mark.parametrize("name", [*STEP, "SLURM_RESTART_COUNT", "MASTER_PORT"])
def test_variables_of_slurm(name: str, value: str | None) -> None:
    environ = (
        {**STEP, name: value} if value is not None else {k: v for k, v in STEP.items() if k != name}
    )
    try:
        found = place(environ)  # type: ignore[arg-type]
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert found["world_size"] == 2
