"""Links in a study that somebody handed over: nothing is written or shown through them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobkit.analysis.cli import collect_main
from jobkit.errors import UsageError
from jobkit.files import append_to, open_regular
from jobkit.launch.follow.status import main as status
from jobkit.launch.local import start
from jobkit.outcome.logs import read_tail
from jobkit.paths import RunPaths
from jobkit.payload.report import Reporter, write_outcome
from jobkit.spec.plan import Plan
from support.fake_study import FakeRun, make_plan, whole_run
from support.hostile import snapshot
from support.place import ROOT

PRECIOUS = "password = hunter2\n"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the victim's with a file that nobody else may see or change."""
    folder = tmp_path / "home"
    (folder / "0").mkdir(parents=True)
    (folder / "precious").write_text(PRECIOUS)
    (folder / "0.jsonl").write_text(PRECIOUS)
    return folder


@pytest.fixture
def plan() -> Plan:
    made = make_plan("s", strategies=("ddp",), gpus=(1,))
    whole_run(made, next(iter(made.runs)))
    return made


def run_of(plan: Plan) -> RunPaths:
    return plan.paths.run(next(iter(plan.runs)))


def put_link(path: Path, target: Path) -> None:
    """Put a link in the place of whatever is there."""
    if os.path.lexists(path):
        path.rename(path.with_name(f"was-{path.name}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def hard_link(path: Path, target: Path) -> None:
    os.link(target, path)


@pytest.mark.parametrize("link", [put_link, hard_link])
def test_nothing_is_appended_through_a_link(tmp_path: Path, outside: Path, link: Any) -> None:
    link(tmp_path / "log", outside / "precious")
    with pytest.raises(OSError, match=r"link"):
        append_to(tmp_path / "log")
    assert (outside / "precious").read_text() == PRECIOUS
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError):
        append_to(tmp_path / "fifo")


@pytest.mark.parametrize("link", [put_link, hard_link])
def test_a_run_is_not_logged_to_a_file_of_elsewhere(plan: Plan, outside: Path, link: Any) -> None:
    """Though the study was fine when it was launched."""
    paths = run_of(plan)
    paths.log.unlink()
    link(paths.log, outside / "precious")
    code = "import sys; from jobkit.launch.task import run_one; run_one(sys.argv[1], ['echo', 'x'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(paths.folder)], capture_output=True, timeout=300
    )
    assert done.returncode and (outside / "precious").read_text() == PRECIOUS


def test_the_launchers_log_is_no_file_of_elsewhere(
    plan: Plan, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_link(plan.paths.launcher_log, outside / "precious")
    monkeypatch.setattr(start.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    with pytest.raises(OSError):
        start.start(plan.paths, SimpleNamespace())  # type: ignore[arg-type]
    assert (outside / "precious").read_text() == PRECIOUS


def test_a_batch_script_is_written_beside_and_renamed(plan: Plan, outside: Path) -> None:
    from jobkit.launch.slurm import submit

    paths, script = run_of(plan), outside / "script"
    script.write_text("#!/bin/sh\n")
    put_link(paths.script, outside / "precious")
    made = SimpleNamespace(submission_file=script, stdout=outside / "out")
    submit._note(paths, SimpleNamespace(paths=made, job_id="7"), {})  # type: ignore[arg-type]
    assert (outside / "precious").read_text() == PRECIOUS
    assert paths.script.read_text() == "#!/bin/sh\n" and not paths.script.is_symlink()


WRITTEN = ["metrics", "metrics/0.jsonl", "ranks", "ranks/0", "ranks/0/rank-0.log", "attempts"]
WRITTEN += ["attempts/0", "checkpoints", "profiles", "profiles/0-rank-0.json"]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_rank_writes_through_no_link(tmp_path: Path, outside: Path, name: str) -> None:
    paths = RunPaths(tmp_path / "run")
    put_link(paths.folder / name, outside / "precious" if "." in name else outside)
    before = snapshot(outside)
    with pytest.raises(UsageError):
        Reporter(paths, 0, 0)
    write_outcome(paths, 0, "failed", 2, "it has a link")
    assert snapshot(outside) == before


def test_run_sh_claims_no_attempt_through_a_link(tmp_path: Path, outside: Path) -> None:
    put_link(tmp_path / "run" / "attempts", outside)
    before = snapshot(outside)
    words = ["bash", str(ROOT / "run.sh"), "--run-dir", str(tmp_path / "run")]
    env = {**os.environ, "JOBKIT_PYTHON": sys.executable}
    done = subprocess.run(
        [*words, "--dataset", "synthetic"], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 2 and "attempts is a link" in done.stderr
    assert snapshot(outside) == before


SOURCES = ["train.log", "metrics/0.jsonl", "metrics", ".", "slurm.log"]


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_of_a_file_of_elsewhere_is_shown(
    outside: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id, spec = next(iter(plan.runs.items()))
    FakeRun(plan.paths.folder, run_id, spec).begin().flush()
    for file in ("train.log", "slurm.log"):
        (outside / file).write_text(f"RuntimeError: {PRECIOUS}")
    link = plan.paths.folder / run_id / name
    leads = "" if name in ("metrics", ".") else "slurm.log" if name == "slurm.log" else "precious"
    put_link(link if name != "." else link.absolute(), outside / leads)
    if name == ".":
        assert link.resolve() == outside.resolve()
    status(["s", "--json"])
    collect_main(["s"])
    shown = capsys.readouterr()
    tables = [p.read_text() for p in plan.paths.folder.glob("*.csv")]
    assert not any("hunter2" in text for text in (shown.out, shown.err, *tables))


def test_a_link_within_the_study_is_read(plan: Plan) -> None:
    log = plan.paths.submitit / "0" / "17_0_log.out"
    log.parent.mkdir(parents=True)
    log.write_text("first\nlast\n")
    paths = run_of(plan)
    paths.scheduler_log.symlink_to("../.submitit/0/17_0_log.out")
    assert read_tail(paths.scheduler_log).lines[:2] == [(1, "first"), (2, "last")]


def test_a_file_that_is_exchanged_after_it_was_opened_is_noticed(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link out of the folder as it is opened, and a harmless file as it is looked at."""
    from jobkit import files

    path, real = tmp_path / "study" / "log", os.path.realpath
    put_link(path, outside / "precious")

    def exchange(what: Any) -> str:
        path.unlink()
        path.write_text("harmless")
        monkeypatch.setattr(files.os.path, "realpath", real)
        return real(what)

    monkeypatch.setattr(files.os.path, "realpath", exchange)
    with pytest.raises(OSError, match="leads out"):
        open_regular(path, within=tmp_path / "study")


def test_figures_are_not_drawn_into_a_folder_of_elsewhere(plan: Plan, outside: Path) -> None:
    from jobkit.analysis.collect.results import collect
    from jobkit.analysis.figures.draw import draw

    put_link(plan.paths.figures, outside)
    before = snapshot(outside)
    with pytest.raises(UsageError, match="is a link"):
        draw(collect("s"))
    assert snapshot(outside) == before


def test_a_probe_of_the_preflight_is_a_new_file(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobkit.checks.preflight import facts

    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    shown: list[Path] = []
    opened = Path.open

    def spy(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        shown.append(self)
        if len(shown) == 1:
            self.symlink_to(outside / "precious")
        return opened(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", spy)
    facts.write_fault(tmp_path)
    monkeypatch.undo()
    assert shown and (outside / "precious").read_text() == PRECIOUS
