"""Odd paths: percent signs, spaces, quotes, letters of all kinds; a current folder that is gone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch.launcher import prepare
from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import submit
from jobkit.launch.slurm.options import Submission, submission
from jobkit.spec.plan import Study
from support.fake_study import whole_study
from support.place import ROOT

ODD = [
    "a b",
    "it's",
    'a "b"',
    "$(id) `id` $HOME",
    "dänisch \u2603",
    "100%",
    "%n %x %%",
    "-x",
    "*?[",
]


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of logs with an odd name."""
    logs = tmp_path / request.param / "logs"
    logs.mkdir(parents=True)
    monkeypatch.setenv("JOBKIT_LOGS", str(logs))
    return logs


def wanted(repeats: int) -> Submission:
    plan = Study(name="s", strategies=("ddp",), gpus=(2,), repeats=repeats).expand()
    return submission(plan, list(plan.runs), Site(name="here"), LaunchRequest())


def printed_by_slurm(pattern: str) -> str:
    """What Slurm makes of a pattern of --output, for the patterns that jobkit uses."""
    known = {"%%": "%", "%j": "17", "%A": "17", "%a": "3"}
    rest, made = pattern, ""
    while rest:
        made += known[rest[:2]] if rest[0] == "%" else rest[0]
        rest = rest[2 if rest[0] == "%" else 1 :]
    return made


@pytest.mark.parametrize(("repeats", "log"), [(1, "17_0_log.out"), (3, "17_3_0_log.out")])
def test_slurm_writes_its_log_into_the_folder_whatever_its_name(
    odd: Path, repeats: int, log: str
) -> None:
    given = wanted(repeats)
    text = submit.script(given.batches[0], given.study.submitit, None)
    line = next(line for line in text.splitlines() if line.startswith("#SBATCH --output="))
    # As a shell reads it, sbatch takes the quotes off.
    quoted = line.removeprefix("#SBATCH --output=")
    pattern = subprocess.run(
        ["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True, check=True
    ).stdout
    assert printed_by_slurm(pattern) == str(odd / "s" / ".submitit" / log)


@pytest.mark.parametrize("name", ["%j", "a%tb", "%A", "%a", "a\nb", "a\x1b[31mb"])
@pytest.mark.parametrize("site", ["local", "slurm"])
def test_a_path_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, site: str
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / name))
    plan = Study(name="s", strategies=("single",), gpus=(1,)).expand()
    with pytest.raises(UsageError, match="its path has"):
        prepare(plan, LaunchRequest(site=site), ask=False)
    assert not (tmp_path / name).exists()


def test_collect_takes_any_path(odd: Path) -> None:
    plan = whole_study("s", strategies=("ddp",), gpus=(1, 2))
    study = "./" + os.path.relpath(plan.paths.folder, odd)
    done = subprocess.run(
        [sys.executable, str(ROOT / "collect_results.py"), study],
        capture_output=True,
        text=True,
        cwd=odd,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert plan.paths.results.exists()


def test_a_study_below_folders_of_all_these_names_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path.joinpath(*ODD, "logs")
    logs.mkdir(parents=True)
    monkeypatch.setenv("JOBKIT_LOGS", str(logs))
    plan = whole_study("s", strategies=("ddp",), gpus=(1, 2))
    done = subprocess.run(
        ["bash", str(ROOT / "plot_results.sh"), "./" + os.path.relpath(plan.paths.folder, logs)],
        capture_output=True,
        text=True,
        cwd=logs,
        env={**os.environ, "JOBKIT_PYTHON": sys.executable},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert plan.paths.report.exists() and plan.paths.results.exists()


def test_a_study_runs_from_a_checkout_and_to_logs_of_any_name(tmp_path: Path) -> None:
    place = tmp_path / 'it\'s 100% "ü" $(id) \u2603'
    place.mkdir()
    for name in ("src", "hpc"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run.sh", "run_benchmarks.py", "plot_results.sh", "plot_results.py"):
        shutil.copy(ROOT / name, place / name)
    shutil.copy(ROOT / "collect_results.py", place)
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JOBKIT_LOGS")}
    environ["JOBKIT_PYTHON"] = sys.executable
    settings = "--dataset synthetic --train-samples 128 --test-samples 64 --epochs 1 --threads 1"
    study = "--site local --strategies single --gpus 1 --repeats 1 --name s"
    words = [sys.executable, "run_benchmarks.py", *study.split(), *settings.split()]
    for command in (words, ["bash", "plot_results.sh"]):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=place, env=environ, timeout=1200
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (place / "logs/s/report.html").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) in ([place.name], ["logs", place.name])


GONE = "import os, sys\nos.rmdir(os.getcwd())\nos.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "-m", "jobkit", "status", "s"],
        [sys.executable, "-m", "jobkit", "collect", "s"],
        [sys.executable, "-m", "jobkit", "cancel", "s"],
        [sys.executable, "-m", "jobkit", "run", "--study", "demo", "--dry-run", "--site", "local"],
        ["/bin/bash", str(ROOT / "plot_results.sh"), "s"],
    ],
)
def test_a_current_folder_that_was_removed_ends_nothing(tmp_path: Path, words: list[str]) -> None:
    whole_study("s", strategies=("ddp",), gpus=(1, 2))
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", GONE, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path / "gone",
        env={**os.environ, "JOBKIT_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
