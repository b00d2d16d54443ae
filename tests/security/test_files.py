"""FIFOs, devices, endless files and links in the place of files that are read, written, locked."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main
from jobkit.data.images import find_source, prepare
from jobkit.errors import UsageError
from jobkit.files import append_to, read_regular, read_tail
from jobkit.launch import local
from jobkit.launch.command import LaunchRequest
from jobkit.launch.status import main as status
from jobkit.metric import comm
from jobkit.paths import RunPaths, StudyPaths, read_json
from jobkit.spec.study import Plan, read_toml
from support.fake_study import FakeRun, make_plan, whole_run
from support.hostile import in_child
from support.place import ROOT

PRECIOUS = "password = hunter2\n"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "precious").write_text(PRECIOUS)
    return folder


@pytest.fixture
def plan() -> Plan:
    made = make_plan("s", strategies=("ddp",), gpus=(1,))
    whole_run(made, next(iter(made.runs)))
    return made


def run_of(plan: Plan) -> RunPaths:
    return plan.paths.run(next(iter(plan.runs)))


def put(path: Path, kind: str) -> None:
    """Put what is no plain file of a bounded size in the place of whatever is there."""
    if os.path.lexists(path):
        path.rename(path.with_name(f"was-{path.name}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        make = {"fifo": os.mkfifo, "folder": os.mkdir}
        make.get(kind, lambda path: path.symlink_to(kind))(path)


KINDS = ("fifo", "/dev/zero", "sparse", "folder")
READERS = (read_json, Plan.read, read_toml, comm.read_csv, read_regular)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    def read(reader: Callable[[Path], object], path: Path) -> str:
        try:
            return str(reader(path))
        except (OSError, ValueError) as error:
            return f"refused: {type(error).__name__}"

    for kind in KINDS:
        put(path := tmp_path / "x.toml", kind)
        done = in_child(lambda path=path: " ".join(read(reader, path) for reader in READERS))
        assert done.faults == [] and str(done.code).count("refused") == len(READERS) - 1, kind
        assert str(done.code).startswith("None")


OF_A_RUN = ("job.json", "submission.json", "attempts/0/outcome.json", "metrics/0.jsonl")
OF_A_RUN += ("train.log",)


def test_status_and_collect_end_whatever_lies_in_a_study() -> None:
    """A log has no bound, as it is read in blocks: a hole of a tebibyte is none of its records."""
    plan = make_plan("s", strategies=("ddp",), gpus=(1, 2, 4, 8), repeats=5)
    pairs = itertools.product(OF_A_RUN, KINDS)
    for (run_id, spec), (name, kind) in zip(plan.runs.items(), pairs, strict=True):
        FakeRun(plan.paths.folder, run_id, spec).begin().train(0, 1, 2).end()
        put(plan.paths.folder / run_id / name, kind)
    done = in_child(lambda: int(status(["s"])) * 10 + int(collect_main(["s"])))
    assert done.faults == [] and done.code in (0, 3), done.out


def test_nothing_is_appended_through_a_link(plan: Plan, outside: Path) -> None:
    """Neither by a run's process, whose study was fine when it was launched, nor by a launcher."""
    paths, precious = run_of(plan), outside / "precious"
    put(paths.log, str(precious))
    with pytest.raises(OSError, match=r"link"):
        append_to(paths.log)
    code = "import sys; from jobkit.launch.task import *; run_in_job(sys.argv[1], ['echo', 'x'])"
    words = [sys.executable, "-c", code, str(paths.folder)]
    assert subprocess.run(words, capture_output=True, timeout=300).returncode
    put(plan.paths.launcher_log, str(precious))
    with pytest.raises(OSError):
        local.start(plan, [], LaunchRequest())
    assert precious.read_text() == PRECIOUS
    put(paths.folder / "x", "fifo")
    with pytest.raises(OSError):
        append_to(paths.folder / "x")


def build(folder: Path) -> None:
    prepare(*find_source("synthetic", folder, 8, 8), lambda line: None)


def launch(folder: Path) -> None:
    with local.held(StudyPaths(folder)):
        pass


def test_a_lock_writes_to_no_file_of_elsewhere(tmp_path: Path, outside: Path) -> None:
    """A link or a FIFO in its place is refused; what lies there keeps its content."""
    for name, lock in (("cache/synthetic-8-8-v2.lock", build), (".launcher.lock", launch)):
        for kind in ("fifo", str(outside / "precious")):
            put(tmp_path / name, kind)
            with pytest.raises(UsageError):
                lock(tmp_path)
        (tmp_path / name).unlink()
        shutil.copy(outside / "precious", tmp_path / name)
        lock(tmp_path)
        assert (tmp_path / name).read_text() == PRECIOUS == (outside / "precious").read_text()


def run_sh(*words, **env: str) -> "subprocess.CompletedProcess[str]":
    python = {"JOBKIT_PYTHON": sys.executable, "JOBKIT_HOST_PYTHON": sys.executable}
    how = {"env": {**os.environ, **python, **env}, "capture_output": True, "text": True}
    return subprocess.run(["bash", str(ROOT / "run.sh"), *map(str, words)], timeout=400, **how)


def test_run_sh_begins_nothing_where_everybody_may_exchange_its_folder(tmp_path: Path) -> None:
    (tmp_path / "single").mkdir()
    (tmp_path / "single").chmod(0o777)
    done = run_sh("--", "true", JOBKIT_LOGS=str(tmp_path))
    assert done.returncode == 2 and "everybody may write there" in done.stderr
    assert not list((tmp_path / "single").iterdir())


def test_run_sh_evaluates_nothing_that_a_file_says(tmp_path: Path) -> None:
    """In the place of an exit code stands what (( )) of a shell would execute."""
    text = f"command[$(touch${{IFS}}{tmp_path}/pwned)] x"
    write = """printf '%s' "$0" >"$JOBKIT_RUN_DIR/attempts/0/failed"; exit 1"""
    own = ["--run-dir", tmp_path / "run", "--launcher", "once"]
    done = run_sh(*own, "--", "bash", "-c", write, text)
    assert done.returncode == 1 and not (tmp_path / "pwned").exists()
    assert (read_json(RunPaths(tmp_path / "run").outcome(0)) or {})["exit_code"] == 1


@pytest.mark.parametrize("name", ["train.log", "metrics/0.jsonl", ".", "slurm.log"])
def test_nothing_of_a_file_of_elsewhere_is_shown(outside, name, capsys) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id, spec = next(iter(plan.runs.items()))
    made = FakeRun(plan.paths.folder, run_id, spec).begin().train(0).flush()
    (outside / "metrics").mkdir()
    shutil.copy(made.paths.metrics(0), outside / "metrics")
    for file in ("train.log", "slurm.log"):
        (outside / file).write_text(f"RuntimeError: {PRECIOUS}")
    made.paths.log.unlink(missing_ok=True)
    put(made.paths.folder.absolute() / name, str(outside / name))
    for path in (*plan.paths.folder.rglob("*"), *outside.rglob("*")):
        os.utime(path, (1.0, 1.0))  # it ended long ago: its log says why
    status(["s", "--json"])
    collect_main(["s"])
    shown = capsys.readouterr()
    tables = [p.read_text() for p in plan.paths.folder.glob("*.csv")]
    assert not any("hunter2" in text for text in (shown.out, shown.err, *tables))
    epochs = plan.paths.epochs.read_text().count("\n") - 1
    assert epochs == (1 if name.endswith("log") else 0)


@pytest.mark.parametrize("name", ["plan.json", "attempts/0/outcome.json"])
def test_a_private_plan_or_outcome_is_read_through_no_link(plan, outside, name, capsys) -> None:
    """Else the report of a study that a colleague made would show the reader's own files."""
    path = (plan.paths.folder if name == "plan.json" else run_of(plan).folder) / name
    content = path.read_text() if path.exists() else '{"reason": "s3cret"}'
    (outside / "mine.json").write_text(content.replace('"notes": []', '"notes": ["s3cret"]'))
    put(path, str(outside / "mine.json"))
    assert read_json(path) is None and read_json(path, follow=True)
    assert status(["s"]) == (2 if name == "plan.json" else 0)
    assert "s3cret" not in "".join(capsys.readouterr())


def test_a_link_within_the_study_is_read(plan: Plan) -> None:
    paths, log = run_of(plan), plan.paths.submitit / "0" / "17_0_log.out"
    log.parent.mkdir(parents=True)
    log.write_text("first\nlast\n")
    paths.scheduler_log.symlink_to("../.submitit/0/17_0_log.out")
    assert read_tail(paths.scheduler_log)[:2] == ["first", "last"]


def test_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_regular(tmp_path / "file", 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than"):
        read_regular(tmp_path / "file", 99)
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"x" * 100
