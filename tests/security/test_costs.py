"""Small files that would cost much: time and memory stay within bounds."""

import json
import os
from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main
from jobkit.errors import nearest
from jobkit.launch.follow.status import main as status
from jobkit.outcome import logs
from jobkit.outcome.slurm_jobs import elements
from jobkit.paths import RunPaths, logs_root
from jobkit.payload.slurm_env import expand_nodes, tasks_per_node
from jobkit.spec.plan import Plan, Study
from support.fake_study import make_plan, whole_run
from support.hostile import in_child


def run_of(plan: Plan) -> RunPaths:
    return plan.paths.run(next(iter(plan.runs)))


@pytest.fixture
def plan() -> Plan:
    return make_plan("s", strategies=("ddp",), gpus=(1,))


def looked(*mains: object) -> None:
    """Each command on the study ends by itself, in time and memory."""
    for main in mains or (status, collect_main):
        done = in_child(lambda main=main: int(main(["s"])))  # type: ignore[operator]
        assert done.faults == [] and done.code in (0, 3), done.out


@pytest.mark.parametrize("name", ["train.log", "slurm.log"])
def test_a_log_of_newlines(plan: Plan, name: str) -> None:
    paths = run_of(plan)
    paths.folder.mkdir()
    (paths.folder / name).write_bytes(b"x\n" + b"\n" * (9 << 20))
    looked()


@pytest.mark.parametrize("name", ["train.log", "metrics/0.jsonl"])
def test_a_file_of_a_tebibyte_without_content(plan: Plan, name: str) -> None:
    whole_run(plan, next(iter(plan.runs)))
    path = run_of(plan).folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.truncate(1 << 40)
    looked()


@pytest.mark.parametrize("lines", [0, 1, 99, 100, 101, 350])
@pytest.mark.parametrize("size", [64, 1000, 1 << 20])
def test_the_tail_of_a_log_has_its_last_lines_and_their_numbers(
    tmp_path: Path, lines: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_MOST_LINES", 100)
    monkeypatch.setattr(logs, "_BLOCK", 37)
    log = tmp_path / "run" / "train.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {n}\n" for n in range(1, lines + 1)))
    found = logs.read_tail(log, size).lines
    assert found[-1] == (lines + 1, "") and len(found) <= 100 + 1
    assert all(text == f"line {number}" for number, text in found[:-1])
    shown = min(lines, 99 if lines >= 100 else lines)
    if size > 10_000:
        assert len(found) - 1 == shown


def test_a_log_that_is_too_long_to_be_counted_shows_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_MOST_NUMBERED", 100)
    log = tmp_path / "run" / "train.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert logs.read_tail(log, 20).lines == [(0, "line 98"), (0, "line 99"), (0, "")]


def test_lines_with_many_new_names_become_few_columns() -> None:
    folder = logs_root() / "mine" / "own"
    folder.mkdir(parents=True)
    with (folder / "train.log").open("w") as log:
        for line in range(300):
            pairs = " ".join(f"k{line}_{i}=1" for i in range(100))
            log.write(f"[METRIC] epoch={line} {pairs}\n")
    from jobkit.analysis.collect.results import collect

    results = collect("mine")
    assert len(results.epochs.columns) < 300
    assert any("29800 columns" in line.replace(",", "") for line in results.warnings())


def test_a_reason_of_many_megabytes_is_cut(plan: Plan) -> None:
    whole_run(plan, next(iter(plan.runs)))
    content = {"status": "failed", "reason": "x " * 4_000_000, "exit_code": 1}
    run_of(plan).outcome(0).write_text(json.dumps(content))
    looked(status)


def test_lists_of_slurm_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nodes"):
        expand_nodes("n[1-999999999]")
    monkeypatch.setattr("jobkit.payload.slurm_env._MOST", 1000)
    for text in ("n[1-1001]", "n[1-100][1-100][1-100]", ",".join(["n[1-999]"] * 9)):
        with pytest.raises(ValueError, match="nodes"):
            expand_nodes(text)
    with pytest.raises(ValueError, match="nodes"):
        tasks_per_node("1(x99999999999)")
    assert elements("17_[0-99999999]") == ["17_[0-99999999]"]
    assert elements("17_[0-2,5%4]") == ["17_0", "17_1", "17_2", "17_5"]


def test_a_long_word_is_compared_with_nothing() -> None:
    assert nearest("x" * 101, ["x" * 100]) == "" != nearest("epoch", ["epochs"])


def test_a_study_of_many_runs_is_still_one() -> None:
    study = Study(name="s", strategies=("ddp",), gpus=(1,), repeats=2000)
    assert len(study.expand().runs) == 2000 and os.environ["JOBKIT_LOGS"]
