"""jobkit as pip installs it from a wheel: every command works in a folder outside a checkout."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jobkit import entry
from support.place import ROOT
from support.records import rows_of

TOP = ("src", "hpc", "pyproject.toml", "setup.py", "README.md", "LICENSE", "edf.toml", "run.sh")
TOP += ("run_benchmarks.py", "collect_results.py", "plot_results.py", "plot_results.sh")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TINY = ("--train-samples", "256", "--test-samples", "128", "--epochs", "1", "--threads", "1")
TINY += ("--why", "0", "--global-batch-size", "64", "--dataset", "synthetic")


def run(*words: str | Path, **options) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=1200, **options)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel of a source distribution is installed.

    That is made of a copy, so that nothing is built in the checkout.
    """
    copy = tmp_path_factory.mktemp("copy")
    out, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("env") / "site-packages"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for path in (ROOT / name for name in TOP):
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=skip)
        else:
            shutil.copy2(path, copy)

    def succeed(*words: str | Path) -> None:
        done = run(*words, cwd=copy)
        assert done.returncode == 0, done.stderr

    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    succeed(sys.executable, "-c", build)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    own = ("--no-deps", "--no-index")
    sdist = next((copy / "dist").glob("*.tar.gz"))
    succeed(*pip, "wheel", *own, "--no-build-isolation", "-w", out, sdist)
    succeed(*pip, "install", *own, "--target", target, next(out.glob("*.whl")))
    git = ("git", "-C", target, "-c", "user.name=x", "-c", "user.email=x@x")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "a user's own repository")):
        succeed(*git, *words)
    return target


class Away:
    """A user's empty folder, outside any checkout; `jobkit` is the one that is installed."""

    def __init__(self, folder: Path, installed: Path) -> None:
        self.folder, self.installed = folder, installed
        kept = {k: os.environ[k] for k in ("HOME", "LANG") if k in os.environ}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {**kept, "PATH": path, "PYTHONPATH": str(installed)}
        self.env["JOBKIT_DATA_DIR"] = str(folder / "data")

    @property
    def prefix(self) -> Path:
        return Path(self("--prefix").stdout.strip())

    def __call__(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.program(self.installed / "bin" / "jobkit", *words, **env)

    def program(self, *words: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
        return run(*words, cwd=self.folder, env={**self.env, **env})

    def without(self, blocked: list[str], *words: str) -> "subprocess.CompletedProcess[str]":
        code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        code += f"from jobkit.__main__ import main; sys.exit(main({list(words)!r}))"
        return self.program(sys.executable, "-c", code)


@pytest.fixture
def away(tmp_path: Path, installed: Path) -> Away:
    return Away(tmp_path, installed)


def test_the_top_level_is_installed_as_it_is_in_the_checkout(away: Away) -> None:
    prefix = away.prefix
    assert prefix.is_relative_to(away.installed)
    for kind in ("run.sh", "edf.toml", "*.py", "*.sh", "hpc/*.sh", "hpc/*/*.toml", "hpc/*"):
        for ours in ROOT.glob(kind):
            if ours.name == "setup.py" or ours.is_dir():
                continue
            theirs = prefix / ours.relative_to(ROOT)
            assert theirs.read_bytes() == ours.read_bytes()
            assert os.access(theirs, os.X_OK) == os.access(ours, os.X_OK), theirs

    ours = [p for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".j2")]
    assert ours and all((away.installed / p.relative_to(ROOT / "src")).is_file() for p in ours)
    done = away.program(sys.executable, "-m", "jobkit.launch.site", "alps")
    assert f"--environment={prefix}/edf.toml" in done.stdout


def test_a_study_is_run_collected_and_drawn(away: Away) -> None:
    (away.folder / "mine.toml").write_text('name = "mine"\nstrategies = ["single"]\ngpus = [1]\n')
    done = away("run", "--study", "mine.toml", "--site", "local", *TINY, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "next: jobkit plot --collect logs/mine " in done.stdout
    assert away("status", "mine").returncode == 0
    done = away.program("bash", away.prefix / "plot_results.sh", "mine")  # as a collect job does
    assert done.returncode == 0, done.stdout + done.stderr
    study = away.folder / "logs" / "mine"
    assert (study / "results.csv").is_file() and (study / "report.html").is_file()
    (row,) = rows_of(study / "results.csv")
    assert row["git_commit"] == ""  # not that repository's
    assert str(ROOT) not in next(study.glob("*/train.log")).read_text()


def test_a_copy_of_run_sh_as_sbatch_makes_it_finds_jobkit(away: Away, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    copy = shutil.copy(away.prefix / "run.sh", spool / "slurm_script")
    python = spool / "python"  # says where jobkit is, and starts nothing
    python.write_text(
        f'#!/bin/sh\n[ "$3" != --prefix ] || exec {sys.executable} "$@"\necho "path $PYTHONPATH"\n'
    )
    python.chmod(0o755)
    own = {"JOBKIT_PYTHON": str(python), "JOBKIT_HOST_PYTHON": sys.executable}
    done = away.program("bash", copy, "--epochs", "1", **own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"path {away.prefix}/src:{away.installed}\n" in done.stdout
    assert len(list(away.folder.glob("logs/single/*/attempts/0"))) == 1
    ready = shutil.copy(away.prefix / "hpc" / "train.sh", spool / "slurm_script_2")
    done = away.program("bash", ready, "--help")
    assert done.returncode == 0 and "--nproc-per-node" in done.stdout, done.stderr
    done = away.program("bash", copy, "--", "sh", "-c", "echo rank $RANK", **own)
    assert "rank 0\n" in done.stdout, done.stderr
    done = away.program("bash", copy, "--check", JOBKIT_PYTHON="/usr/bin/false")
    assert done.returncode == 2 and "no src/jobkit in" in done.stderr
    done = away.program("bash", away.prefix / "run.sh", JOBKIT_PYTHON="/usr/bin/false")
    assert done.returncode == 2
    assert "python -m pip install '/path/to/jobkit[payload]'" in done.stderr


def test_another_python_finds_jobkit_alone(away: Away) -> None:
    """A container's has packages of its own: the path that it gets must hold no others."""
    code = "import jobkit.paths as p, sys; print(p.REPOSITORY); import minicluster.cli, submitit"
    path = str(away.prefix / "src")
    done = away.program(sys.executable, "-S", "-c", code, PYTHONPATH=path)
    assert done.stdout.strip() == str(away.prefix)
    assert done.stderr.strip().endswith("No module named 'submitit'")


def test_a_plain_install_submits_and_says_which_extra_is_missing(away: Away) -> None:
    absent = [name for names in entry.EXTRAS.values() for name in names]
    done = away.without(absent, "run", "--study", "demo", "--site", "alps", "--dry-run")
    assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr
    (away.folder / "logs" / "x").mkdir(parents=True)
    (away.folder / "logs" / "x" / "plan.json").write_text("{}")
    for words, package, extra in (
        ("run --study demo --site local", "torch", "payload"),
        ("collect", "pandas", "analysis"),
    ):
        done = away.without(absent, *words.split())
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"the package '{package}' is not installed" in done.stderr
        assert f"python -m pip install '/path/to/jobkit[{extra}]'" in done.stderr


def test_the_door_knows_the_extra_of_every_package() -> None:
    def names(lines: list[str]) -> set[str]:
        return {line.split(">")[0] for line in lines}

    called = {"yaml": "pyyaml"}  # on the package index
    for extra in ("payload", "analysis", "kubernetes"):
        known = {called.get(name, name) for name in entry.EXTRAS[extra]}
        assert known - {"numpy"} == names(EXTRAS[extra])  # numpy comes with pandas
    assert names(PROJECT["dependencies"]) == {"submitit", "rich"}
    assert "all" in (ROOT / "Makefile").read_text().split("--editable '.[")[1].split("]")[0]
