"""collect --logs on logs of the meter outside a study, and of jobkit's own training."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobkit.analysis.cli import collect_main
from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.findings.verdict import verdict
from jobkit.metric.line import encode
from support.fake_study import make_plan, whole_run

SIZE = ["--size", r"^(\d+)gpu"]
TRACEBACK = 'Traceback (most recent call last):\n  File "t.py"\nValueError: no\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(ranks: int, rate: float = 64.0, end: str = "ok", attempt: int = 0, t: float = 1.0) -> str:
    """What rank 0's meter prints of ten steps, of ten samples each."""
    start = {"world_size": ranks, "unit": "samples", "source": "meter", "work_source": "counted"}
    window = {"step": 10, "steps": 10, "wall_s": 100 / rate, "work": 100}
    records: list[dict[str, Any]] = [{"kind": "run_start", **start}, {"kind": "window", **window}]
    records.append({"kind": "run_end", "status": end, "reason": "rank 0: ValueError: no"})
    common = {"v": 1, "study": "", "run_id": "", "attempt": attempt, "rank": 0}
    made = [encode({**common, "seq": n, "t": t, **r}) for n, r in enumerate(records)]
    return "".join(f"[METRIC] {line}\n" for line in made)


def collected(*words: str) -> Results:
    collect_main(["--logs", "*.log", *SIZE, "--name", "m", *words])
    return collect("m", write=False)


def test_ranks_of_which_one_counted_are_compared_in_steps(folder: Path) -> None:
    for ranks in (1, 4):
        (folder / f"{ranks}gpu.log").write_text(lines(ranks))
    found = collected()
    assert list(found.runs["throughput"]) == pytest.approx([6.4, 6.4])
    assert set(found.runs["throughput_unit"]) == {"steps/s"}
    assert not [w for w in found.warnings() if "not compared" in w]
    assert verdict(found, "GPUs")[-1] == "All 2 runs are ok."
    found = collected("--unit", "tokens", "--work-per-step", "4096")
    assert list(found.runs["throughput"]) == pytest.approx([6.4 * 4096] * 2)
    assert set(found.runs["throughput_unit"]) == {"tokens/s"}


def test_the_values_of_an_epoch_are_columns_and_identify_nothing(folder: Path) -> None:
    values = {"bleu": 12.5, "val_loss": 9.0, "run_id": 7, "images_per_s": 5.0, "world_size": 3}
    record = {"kind": "epoch", "epoch": 0, "val_loss": 0.25, "values": values}
    common = {"v": 1, "study": "", "run_id": "", "attempt": 0, "rank": 0, "seq": 3, "t": 1.0}
    (folder / "1gpu.log").write_text(lines(1) + f"[METRIC] {encode({**common, **record})}\n")
    found = collected()
    (row,) = found.epochs.to_dict("records")
    assert (row["bleu"], row["val_loss"], row["world_size"]) == (12.5, 0.25, 1)
    assert row["run_id"] != 7 and "values" not in row
    assert found.runs["throughput_unit"].tolist() == ["samples/s"]  # as the windows say it
    assert not [w for w in found.warnings() if "no table" in w]


def test_a_size_of_ranks_fills_nodes(folder: Path) -> None:
    (folder / "8gpu.log").write_text(lines(8))
    (folder / "2gpu.log").write_text(lines(2))
    for size in (r"(?P<ranks>\d+)gpu", r"no such (\d+)"):  # by its name, and as recorded
        found = collected("--size", size, "--gpus-per-node", "4").runs.set_index("run_id")
        shapes = found[["nodes", "ranks_per_node"]].to_numpy().tolist()
        assert dict(zip(found.index, shapes, strict=True)) == {
            "8gpu.log": [2, 4],
            "2gpu.log": [1, 2],
        }


def test_a_second_training_in_a_log_is_told_and_not_mixed_in(folder: Path) -> None:
    (folder / "1gpu.log").write_text(lines(1, 100.0) + lines(1, 1000.0, t=2.0))
    found = collected()
    assert list(found.runs["throughput"]) == pytest.approx([100.0])
    (line,) = found.warnings()
    assert line.startswith("1gpu.log: 3 [METRIC] lines rejected, the first: of a second run")
    twice = lines(1, 100.0)
    (folder / "1gpu.log").write_text(twice + twice)  # a copy is none
    assert collected().warnings() == []


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (lines(1, end="failed") + TRACEBACK + lines(1, attempt=1), "ok"),
        (lines(1) + TRACEBACK + lines(1, attempt=1, end="failed"), "failed"),
        (TRACEBACK + lines(1), "ok"),
        (lines(1).rsplit("[METRIC]", 1)[0] + TRACEBACK, "failed"),
    ],
)
def test_the_newest_attempt_says_how_a_run_ended(folder: Path, log: str, status: str) -> None:
    (folder / "1gpu.log").write_text(log)
    assert list(collected().runs["status"]) == [status]


def test_the_tail_of_a_log_behind_a_link_is_read(folder: Path) -> None:
    away, here = folder / "scratch" / "a", folder / "project" / "b"
    away.mkdir(parents=True)
    here.mkdir(parents=True)
    log = lines(1).rsplit("[METRIC]", 1)[0]
    (away / "x.out").write_text(log + "torch.OutOfMemoryError: CUDA out of memory. Tried\n")
    (here / "1gpu.log").symlink_to(away / "x.out")
    found = collected("--logs", "project/b/1gpu.log")
    assert list(found.runs["status"]) == ["oom"]


def test_a_log_that_two_words_name_counts_once(folder: Path) -> None:
    (folder / "1gpu.log").write_text(lines(1))
    (folder / "2gpu.log").symlink_to("1gpu.log")
    found = collected("--logs", "*.log", "1gpu.log", str(folder / "1gpu.log"))
    assert list(found.runs["run_id"]) == ["1gpu.log"]


def test_logs_of_own_trainings_with_other_settings_are_series(folder: Path) -> None:
    for precision in ("fp32", "bf16"):
        plan = make_plan(precision, strategies=("ddp",), gpus=(2,),
                         settings={"precision": precision})  # fmt: skip
        (run_id,) = plan.runs
        whole_run(plan, run_id)
        shutil.copy(plan.paths.run(run_id).log, folder / f"{precision}.log")
    found = collected()
    assert sorted(found.runs["series"]) == ["ddp, bf16", "ddp, fp32"]
    assert list(found.runs["repeat"]) == [0, 0]
    assert pd.notna(found.runs["throughput"]).all()


@pytest.mark.parametrize("word", ["", ".", "**.nix"])
def test_a_word_that_is_no_pattern_of_files_is_one_line(
    folder: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect_main(["--logs", word, *SIZE]) == 2
    assert capsys.readouterr().err.count("\n") == 1
