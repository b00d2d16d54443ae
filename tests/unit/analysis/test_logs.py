"""collect --logs: logs that exist already, each a run; try-pattern."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobkit.analysis.cli import collect_main
from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.log_options import try_pattern
from jobkit.errors import Exit
from jobkit.metric.kinds import encode
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun, make_plan, whole_run

LINE = "iter {n}: loss 3.0, time {ms}ms, mfu 30.00%\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(place: Path) -> Path:
    """A folder with four logs of nanoGPT: two of one rank, one of two, one that crashed."""
    for name, ranks, ms in (("a", 1, 100.0), ("b", 1, 102.0), ("c", 2, 55.0), ("d", 4, 30.0)):
        lines = "".join(LINE.format(n=n, ms=900.0 if n == 0 else ms) for n in range(0, 60, 10))
        (place / f"slurm-{name}.out").write_text(f"ranks={ranks}\n{lines}")
    with (place / "slurm-d.out").open("a") as log:
        log.write('Traceback (most recent call last):\n  File "t.py"\nValueError: no\n')
    return place


ARGUMENTS = ["--logs", "slurm-*.out", "--pattern", "nanogpt", "--size", r"ranks=(\d+)"]


def test_each_log_is_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_main([*ARGUMENTS, "--name", "old"]) == Exit.INCOMPLETE  # one crashed
    results = Results.load("old")
    runs = results.runs.set_index("run_id")
    assert list(runs["status"]) == ["ok", "ok", "ok", "failed"]
    assert "ValueError" in runs.loc["slurm-d.out", "reason"]
    assert list(runs["world_size"]) == [1, 1, 2, 4]
    assert list(runs["repeat"]) == [0, 1, 0, 0]
    assert runs.loc["slurm-c.out", "throughput"] == pytest.approx(1 / 0.055)
    assert runs.loc["slurm-c.out", "throughput_unit"] == "steps/s"
    size = next(s for s in results.sizes if s.world_size == 2)
    assert size.speed_up == pytest.approx((1 / 0.055) / ((1 / 0.1 + 1 / 0.102) / 2))
    assert len(results.steps) == 24
    assert "whether it ended well is not known" in runs.loc["slurm-a.out", "reason"]
    assert (folder / "logs" / "old" / "steps.csv").exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (["demo"], "not both"),
        (["--size", ""], "--logs needs --size"),
        (["--logs", "no-*.out"], "no such file"),
        (["--logs", ""], "no such file"),
        (["--logs", "**.nix"], "no such file"),
        (["--size", "ranks"], "has no group"),
        (["--size", "ranks=("], "does not compile"),
        (["--size", "(?P<gpus>[0-9]+)"], "must be one of"),
        (["--size", r"(?P<nodes>\d+)"], "finds nodes alone: add --gpus-per-node N"),
        (["--pattern", "nanogtp"], "did you mean 'nanogpt'"),
        (["--work-per-step", "0"], "number over 0"),
        (["--name", "../up"], "study name"),
    ],
)
def test_a_bad_request_is_one_line(
    folder: Path, changed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = collect_main([*ARGUMENTS, *changed])
    except SystemExit as stop:
        code = int(str(stop.code))
    error = capsys.readouterr().err
    assert code == Exit.USAGE
    assert says in error and error.count("\n") == 1
    assert not (folder / "logs").exists()


def test_a_log_without_a_size_or_a_line_is_told_and_not_dropped(folder: Path) -> None:
    (folder / "slurm-e.out").write_text(LINE.format(n=10, ms=5))
    (folder / "slurm-f.out").write_text("ranks=8\nnothing\n")
    assert collect_main(ARGUMENTS) == Exit.INCOMPLETE
    runs = Results.load("from-logs").runs.set_index("run_id")
    assert "no size" in runs.loc["slurm-e.out", "reason"]
    assert "no line of pattern nanogpt" in runs.loc["slurm-f.out", "reason"]


@pytest.mark.parametrize(
    ("size", "more", "shapes"),
    [
        (r"nodes=(?P<nodes>\d+)", ["--gpus-per-node", "2"], [(2, 2), (3, 2)]),
        (r"ranks=(\d+)", ["--gpus-per-node", "4"], [(2, 4), (2, 4)]),
        (r"nodes=(?P<nodes>\d+) ranks=(?P<ranks>\d+)", [], [(2, 4), (3, 2)]),
        (r"nodes=\d+ ranks=(\d+)", [], [(1, 8), (1, 6)]),
        (r"(?P<series>[ab])\.out|ranks=(\d+)", [], [None, None]),  # found in the name alone
        (r"for (?P<series>\w+) ranks=(\d+)", [], [(1, 8), (1, 6)]),
    ],
)
def test_what_a_size_finds(
    folder: Path, size: str, more: list[str], shapes: list[tuple[int, int] | None]
) -> None:
    line = LINE.format(n=10, ms=5) + LINE.format(n=20, ms=5)
    (folder / "a.out").write_text(f"nodes=2 ranks=8 for x ranks=8\n{line}")
    (folder / "b.out").write_text(f"nodes=3 ranks=6 for y ranks=6\n{line}")
    given = ["--logs", "[ab].out", "--pattern", "nanogpt", "--size", size, *more]
    collect_main(given)
    runs = Results.load("from-logs").runs.set_index("run_id")
    for name, shape in zip(("a.out", "b.out"), shapes, strict=True):
        row = runs.loc[name]
        if shape is None:
            assert row["status"] == "failed" and "finds no number of ranks in it" in row["reason"]
        else:
            assert (row["nodes"], row["ranks_per_node"]) == shape
            if "P<nodes>" in size:
                assert row["world_size"] == shape[0] * shape[1]
            assert row["status"] == "ok"


def test_rejected_and_unused_lines_and_epochs_of_a_log_are_taken(folder: Path) -> None:
    log = "ranks=2\n[METRIC] epoch=0 images_per_s=90 val_accuracy=0.5\n"
    log += "[METRIC] epoch=1 images_per_s=100 val_accuracy=0.6\n"
    log += "[METRIC] note=x\n[METRIC] loss=1 loss=2\n[METRIC] last=1.\n"
    (folder / "slurm-g.out").write_text(log)
    collect_main(["--logs", "slurm-g.out", "--size", r"ranks=(\d+)", "--name", "g"])
    found = Results.load("g")
    row = found.runs.iloc[0]
    assert (row["status"], row["epochs_done"], row["best_val_accuracy"]) == ("ok", 2, 0.6)
    assert (row["throughput"], row["throughput_unit"]) == (100, "images/s")
    assert list(found.epochs["val_accuracy"]) == [0.5, 0.6]
    assert row["lines_rejected"] == 2
    first = f"the first at byte {log.index('[METRIC] loss')}: a name twice: two lines in one"
    assert found.warnings() == [
        f"slurm-g.out: 2 [METRIC] lines rejected, {first}",
        "slurm-g.out: 1 [METRIC] line is in no table (note)",
    ]


def test_a_log_of_jobkit_itself_says_its_size_settings_and_end(
    folder: Path, tmp_path: Path
) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(2,))
    (run_id,) = plan.runs
    whole_run(plan, run_id)
    shutil.copy(plan.paths.run(run_id).log, folder / "slurm-17.out")
    own = collect("s", write=False).runs.iloc[0]
    collect_main(["--logs", "slurm-17.out", "--size", r"no such (\d+)", "--name", "copy"])
    row = Results.load("copy").runs.iloc[0]
    names = "status strategy nodes ranks_per_node world_size throughput throughput_unit"
    for name in f"{names} epochs_done val_accuracy model global_batch_size".split():
        assert row[name] == own[name], name
    assert row["status"] == "ok" and pd.isna(row["reason"])
    other = RunSpec(epochs=3, dataset="synthetic", train_samples=8192, repeat=1)
    FakeRun(plan.paths.folder, "other", other).begin().train(0).end("failed", "rank 1: gone", 1)
    shutil.copy(plan.paths.run("other").log, folder / "slurm-18.out")
    collect_main(["--logs", "slurm-18.out", "--size", r"no such (\d+)", "--name", "bad"])
    row = Results.load("bad").runs.iloc[0]
    assert (row["status"], row["reason"]) == ("failed", "rank 1: gone")


def test_a_rate_of_the_warm_up_alone_is_said(folder: Path) -> None:
    (folder / "h.out").write_text("ranks=1\n" + LINE.format(n=10, ms=5) + LINE.format(n=20, ms=5))
    words = ["--logs", "h.out", *ARGUMENTS[2:], "--name", "h"]
    collect_main(words)
    assert Results.load("h").warnings() == []
    collect_main([*words, "--warmup-steps", "50"])
    (line,) = Results.load("h").warnings()
    assert line.startswith("h.out: only warm-up steps were measured")


def test_try_pattern_shows_lines_and_the_rate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.out").write_text("nothing\n")
    for log, code in (("slurm-a.out", Exit.OK), ("other.out", Exit.INCOMPLETE), ("no", Exit.USAGE)):
        assert try_pattern([log, "--pattern", "nanogpt"]) == code
    shown, errors = capsys.readouterr()
    assert "line 2: step=0" in shown and "6 lines found" in shown
    assert "throughput = 10" in shown and "throughput_unit = steps/s" in shown
    assert "No such file" in errors


SIZE = ["--size", r"^(\d+)gpu"]
TRACEBACK = 'Traceback (most recent call last):\n  File "t.py"\nValueError: no\n'


def meter_lines(
    ranks: int, rate: float = 64.0, end: str = "ok", attempt: int = 0, t: float = 1.0
) -> str:
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
    return Results.load("m")


def test_ranks_of_which_one_counted_are_compared_in_steps(place: Path) -> None:
    for ranks in (1, 4):
        (place / f"{ranks}gpu.log").write_text(meter_lines(ranks))
    found = collected()
    assert list(found.runs["throughput"]) == pytest.approx([6.4, 6.4])
    assert set(found.runs["throughput_unit"]) == {"steps/s"}
    assert not [w for w in found.warnings() if "not compared" in w]
    assert verdict(found, "GPUs")[-1] == "All 2 runs ok."
    found = collected("--unit", "tokens", "--work-per-step", "4096")
    assert list(found.runs["throughput"]) == pytest.approx([6.4 * 4096] * 2)
    assert set(found.runs["throughput_unit"]) == {"tokens/s"}


def test_a_rate_that_each_rank_prints_is_of_one_or_of_all_and_not_compared(place: Path) -> None:
    lines = [f"[METRIC] step={n} {{}}=1,000.0\n" for n in range(1, 9)]
    for ranks in (1, 2):
        printed = "".join(ranks * line for line in lines)
        (place / f"{ranks}gpu.log").write_text(printed.format(*["tokens_per_s"] * 8 * ranks))
    runs = collected().runs.set_index("run_id")
    assert runs.loc["1gpu.log", "throughput"] == 1000 and runs.loc["2gpu.log", "status"] == "failed"
    assert "printed 2 times, as by all 2 ranks" in runs.loc["2gpu.log", "reason"]
    log = place / "2gpu.log"
    of_two = "".join(
        f"[METRIC] step={n} tokens_per_s=900\n[METRIC] step={n} lr=1\n" for n in (1, 2, 3)
    )
    printed = log.read_text()
    log.write_text(of_two)  # two lines of a step, which say different things
    assert list(collected().runs["throughput"]) == [1000, 900]
    log.write_text(printed.replace("tokens_per_s", "tokens_per_s_per_rank"))
    found = collected("--scaling", "weak")
    assert list(found.runs["throughput"]) == [1000, 2000]
    assert set(found.scaling["scaling"]) == {"weak"}


def test_the_values_of_an_epoch_are_columns_and_identify_nothing(place: Path) -> None:
    values = {"bleu": 12.5, "val_loss": 9.0, "run_id": 7, "images_per_s": 5.0, "world_size": 3}
    record = {"kind": "epoch", "epoch": 0, "val_loss": 0.25, "values": values}
    common = {"v": 1, "study": "", "run_id": "", "attempt": 0, "rank": 0, "seq": 3, "t": 1.0}
    (place / "1gpu.log").write_text(meter_lines(1) + f"[METRIC] {encode({**common, **record})}\n")
    found = collected()
    (row,) = found.epochs.to_dict("records")
    assert (row["bleu"], row["val_loss"], row["world_size"]) == (12.5, 0.25, 1)
    assert row["run_id"] != 7 and "values" not in row
    assert found.runs["throughput_unit"].tolist() == ["samples/s"]  # as the windows say it
    assert not [w for w in found.warnings() if "no table" in w]


def test_a_size_of_ranks_fills_nodes(place: Path) -> None:
    for ranks in (8, 2):
        (place / f"{ranks}gpu.log").write_text(meter_lines(ranks))
    for size in (r"(?P<ranks>\d+)gpu", r"no such (\d+)"):  # by its name, and as recorded
        runs = collected("--size", size, "--gpus-per-node", "4").runs.sort_values("world_size")
        assert runs[["nodes", "ranks_per_node"]].to_numpy().tolist() == [[1, 2], [2, 4]]


def test_a_second_training_in_a_log_is_told_and_not_mixed_in(place: Path) -> None:
    (place / "1gpu.log").write_text(meter_lines(1, 100.0) + meter_lines(1, 1000.0, t=2.0))
    found = collected()
    assert list(found.runs["throughput"]) == pytest.approx([100.0])
    (line,) = found.warnings()
    assert line.startswith("1gpu.log: 3 [METRIC] lines rejected, the first: of a second run")
    twice = meter_lines(1, 100.0)
    (place / "1gpu.log").write_text(twice + twice)  # a copy is none
    assert collected().warnings() == []


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (meter_lines(1, end="failed") + TRACEBACK + meter_lines(1, attempt=1), "ok"),
        (meter_lines(1) + TRACEBACK + meter_lines(1, attempt=1, end="failed"), "failed"),
        (TRACEBACK + meter_lines(1), "ok"),
        (meter_lines(1).rsplit("[METRIC]", 1)[0] + TRACEBACK, "failed"),
    ],
)
def test_the_newest_attempt_says_how_a_run_ended(place: Path, log: str, status: str) -> None:
    (place / "1gpu.log").write_text(log)
    assert list(collected().runs["status"]) == [status]


def test_logs_of_own_trainings_with_other_settings_are_not_compared(place: Path) -> None:
    for precision in ("fp32", "bf16"):
        plan = make_plan(precision, strategies=("ddp",), gpus=(2,),
                         settings={"precision": precision})  # fmt: skip
        (run_id,) = plan.runs
        whole_run(plan, run_id)
        shutil.copy(plan.paths.run(run_id).log, place / f"{precision}.log")
    assert "ddp: not compared: precision differs (bf16, fp32)" in collected().warnings()
