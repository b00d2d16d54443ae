"""collect --logs: logs that exist already, each a run."""

import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobkit.analysis.cli import collect_main, plot_main
from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.tables import proposal_table
from jobkit.program.lines import encode
from jobkit.spec.runspec import RunSpec
from support.fake_study import FakeRun, make_plan, whole_run
from support.refusals import refusal

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py"\nValueError: no\n'
NANOGPT = ["--pattern", "nanogpt", "--size", r"ranks=(?P<ranks>\d+)", "--scaling", "strong"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def collected(*words: str, **logs: str) -> Results:
    """What is collected of these logs: a text by the name of its file, without .log."""
    for name, text in logs.items():
        Path(f"{name}.log").write_text(text)
    names = sorted(map(str, Path().glob("*.log")))
    collect_main(["--logs", *names, "--size", r"gpu(?P<ranks>\d+)", "--name", "m", *words])
    return Results.load("m")


def nanogpt(ms: float, head: str = "ranks=1", first: float = 900.0) -> str:
    """A log of nanoGPT, whose first line has the start-up in it."""
    times = [first, *[ms] * 5]
    lines = (f"iter {10 * n}: loss 3, time {t}ms, mfu 3.00%\n" for n, t in enumerate(times))
    return f"{head}\n{''.join(lines)}"


def test_each_log_is_a_run_and_none_is_dropped() -> None:
    logs = {"a": nanogpt(100.0), "b": nanogpt(102.0), "c": nanogpt(55.0, "ranks=2")}
    logs |= {"d": nanogpt(30.0, "ranks=4") + TRACEBACK, "e": nanogpt(5, "none")}
    logs |= {"f": "ranks=8\n", "g": ""}
    results = collected(*NANOGPT, **logs)
    runs = results.runs.set_index("run_id")
    assert list(runs["status"]) == ["ok"] * 3 + ["failed"] * 4
    reasons = (*["not known"] * 3, "ValueError", "no size", "rate; the last line is: ranks=8")
    reasons = (*reasons, "the file is empty")
    assert all(r in n for r, n in zip(reasons, runs["reason"], strict=True))
    assert list(runs["world_size"])[:4] == [1, 1, 2, 4]
    assert list(runs["repeat"])[:4] == [0, 1, 0, 0]
    assert runs.loc["c.log", "throughput"] == pytest.approx(1 / 0.055)
    assert runs.loc["c.log", "throughput_unit"] == "steps/s"
    size = next(s for s in results.sizes if s.world_size == 2)
    assert size.speed_up == pytest.approx((1 / 0.055) / ((1 / 0.1 + 1 / 0.102) / 2))
    assert len(results.steps) == 5 * 6


def test_a_bad_request_is_one_line(place: Path, capsys) -> None:
    Path("a.log").write_text(nanogpt(5))
    for changed, says in (
        (["demo"], "not both"),
        (["--size", ""], "--logs needs --size"),
        (["--logs", "no-*.out"], "no such file"),
        (["--logs", ""], "no such file"),  # it would be the current folder
        (["--size", "ranks"], "name its groups ranks, nodes or series, as 'gpus=(?P<ranks>"),
        (["--size", "ranks=("], "does not compile"),
        (["--size", r"gpus=(?P<ranks>\d+)"], "finds no number of ranks in any log"),
        (["--size", "(?P<gpus>[0-9]+) (?P<ranks>1)"], "has no size: name its groups"),
        (["--size", r"(?P<nodes>\d+)"], "finds nodes alone: add --gpus-per-node"),
        (["--pattern", "nanogtp"], "did you mean 'nanogpt'"),
        (["--work-per-step", "0"], "number over 0"),
        (["--name", "../up"], "study name"),
    ):
        assert says in refusal(collect_main, ["--logs", "a.log", *NANOGPT, *changed], capsys)
    assert not (place / "logs").exists()


def test_an_error_that_training_went_on_after_is_said_and_was_no_end() -> None:
    """What a rank said before the last line of another one may have been the end."""
    retried = (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB; retrying with batch 32\n"
    )
    *early, last = nanogpt(100.0, "").splitlines(keepends=True)
    rate = "{'loss': 4.3, 'epoch': 1}\n{'train_runtime': 9.9, 'train_samples_per_second': 30.5}\n"
    logs = {"a": TRACEBACK + nanogpt(100.0), "b": retried + nanogpt(100.0)}
    logs |= {"c": "".join([*early, TRACEBACK, last, "ranks=1"]), "d": f"ranks=1\n{TRACEBACK}"}
    runs = collected(*NANOGPT, **logs).runs
    assert list(runs["status"]) == ["ok", "ok", "failed", "failed"]
    assert "so it did not end the run: ValueError: no" in runs["problems"][0]
    assert "CUDA out of memory" in runs["problems"][1] and runs["reason"][3] == "ValueError: no"
    more = {"a": f"ranks=1\n{TRACEBACK}{rate}", "b": rate.splitlines()[0] + TRACEBACK + "ranks=1\n"}
    runs = collected(*NANOGPT, "--pattern", "transformers", **more).runs
    assert list(runs["status"])[:2] == ["ok", "failed"]
    steps = "[METRIC] step=1 step_time_s=1\n[METRIC] step=2 step_time_s=1\n"
    runs = collected(gpu1=retried + steps).runs.set_index("run_id")
    assert runs.loc["gpu1.log", "status"] == "ok"


def test_what_a_size_finds() -> None:
    logs = {n: nanogpt(5, f"nodes={nodes} ranks={ranks} for {n} ranks={ranks}")
            for n, nodes, ranks in (("a", 2, 8), ("b", 3, 6))}  # fmt: skip
    for size, shapes in (
        (r"nodes=(?P<nodes>\d+) --gpus-per-node 2", [(2, 2, 4), (3, 2, 6)]),
        (r"ranks=(?P<ranks>\d+) --gpus-per-node 4", [(2, 4, 8), (2, 4, 6)]),
        (r"nodes=(?P<nodes>\d+) ranks=(?P<ranks>\d+)", [(2, 4, 8), (3, 2, 6)]),
        (r"for (?P<series>\w+) ranks=(?P<ranks>\d+)", [(None, None, 8), (None, None, 6)]),
    ):
        size, _, per_node = size.partition(" --gpus-per-node ")
        more = ["--gpus-per-node", per_node] if per_node else []
        runs = collected(*NANOGPT, "--size", size, *more, **logs).runs
        found = runs[["nodes", "ranks_per_node", "world_size"]].astype(object)
        assert found.where(found.notna(), None).to_numpy().tolist() == [*map(list, shapes)]
        assert set(runs["status"]) == {"ok"}
    # Where the one part of an alternative is found in the name, the other one is not looked for.
    results = collected(*NANOGPT, "--size", r"(?P<series>[ab])\.log|ranks=(?P<ranks>\d+)")
    assert results.runs["reason"].str.contains("finds no number of ranks in it").all()
    assert "on an unknown number of ranks with a 1 of 1 runs" in verdict(results, "ranks")[-1]


def test_a_closed_log_is_no_wrong_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("a.log"))
    assert list(collected(*NANOGPT, a="none").runs["status"]) == ["failed"]


def test_an_evaluation_is_in_no_rate_and_unknown_nodes_are_in_no_cost(capsys) -> None:
    """Each evaluation falls on a logged line, whose time would count ten times too often."""
    wait = "step {0}: train loss 2, val loss 2\niter {0}: loss 2, time 30000ms, mfu 1.00%\n"
    once = wait.format(60).splitlines(keepends=True)
    twice = "".join(2 * line for line in once)  # as by two loggers
    logs = {
        f"n{n}": nanogpt(ms, f"ranks={n}") + twice + "iter 70: loss 2, time nanms, mfu 1%"
        for n, ms in ((1, 800.0), (8, 107.0), (16, 58.0), (32, 33.0))
    }
    results = collected(*NANOGPT, **logs)
    efficiencies = [s.efficiency for s in results.sizes][1:]
    assert efficiencies == pytest.approx([0.935, 0.862, 0.758], abs=1e-3)
    assert results.warnings() == []
    assert plot_main(["m", "--forecast", "64", "--work", "1000 steps"]) == 0
    table = Path("logs/m/scaling.md").read_text()
    assert re.search(r"\| 8 \| 1 of 1 .* \| - \|\n", table)
    assert re.search(r" 64 +- +2.00 ", capsys.readouterr().out)
    assert "collect with --gpus-per-node for node-hours" in table
    assert "Strong scaling" in table
    for log in Path().glob("n?*.log"):
        log.unlink()
    always = "ranks=1\n" + "".join(wait.format(10 * n) for n in range(9))
    always = collected(*NANOGPT, a=always + "iter 90: loss 2, time 9ms, mfu 1.00%\n")
    assert always.sizes[0].throughput == pytest.approx(9 / 240.009)  # not of the one line alone
    assert "stands one without a time, as of an evaluation" in always.warnings()[0]


def test_rejected_and_unused_lines_and_epochs_of_a_log_are_taken() -> None:
    log = "[METRIC] epoch=0 images_per_s=90 val_accuracy=0.5\n"
    log += "[METRIC] epoch=1 images_per_s=100 val_accuracy=0.6\n"
    log += "[METRIC] note=x\n[METRIC] loss=1 loss=2\n[METRIC] last=1.\n"
    found = collected(gpu2=log)
    row = found.runs.iloc[0]
    assert (row["status"], row["epochs_done"], row["best_val_accuracy"]) == ("ok", 2, 0.6)
    assert (row["throughput"], row["throughput_unit"]) == (100, "images/s")
    assert list(found.epochs["val_accuracy"]) == [0.5, 0.6]
    assert row["lines_rejected"] == 2
    first = "the first: a name twice: two lines in one"
    assert found.warnings() == [
        f"gpu2.log: 2 [METRIC] lines rejected, {first}",
        "gpu2.log: 1 [METRIC] line is in no table (note)",
    ]


def test_logs_of_jobkit_itself_say_their_rate_and_end() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(2,))
    (run_id,) = plan.runs
    whole_run(plan, run_id)
    shutil.copy(plan.paths.run(run_id).log, "gpu2.log")
    FakeRun(plan.paths.folder, "other", RunSpec()).begin().train(0).end("failed", "rank 1: gone", 1)
    shutil.copy(plan.paths.run("other").log, "other-gpu1.log")
    own = collect("s", write=False).runs.set_index("run_id").loc[run_id]
    rows = collected("--gpus-per-node", "4").runs.set_index("run_id")
    names = ["status", "nodes", "ranks_per_node", "world_size", "throughput", "throughput_unit"]
    names += ["epochs_done", "val_accuracy", "global_batch_size"]
    assert rows.loc["gpu2.log", names].to_list() == own[names].to_list()
    assert pd.isna(rows.loc["gpu2.log", "reason"])
    assert list(rows.loc["other-gpu1.log", ["status", "reason"]]) == ["failed", "rank 1: gone"]


def test_a_rate_of_the_warm_up_alone_is_said() -> None:
    # The pattern that was given counts before the windows of a log.
    found = collected(*NANOGPT, h=nanogpt(250.0) + meter(1))
    assert found.warnings() == []
    assert found.runs["step_time_s"].tolist() == pytest.approx([0.25])
    (line,) = collected(*NANOGPT, "--warmup-steps", "50").warnings()
    assert line.startswith("h.log: only warm-up steps were measured")


def meter(
    ranks: int, rate: float = 64.0, end: str = "ok", attempt: int = 0, **more: dict[str, Any]
) -> str:
    """What rank 0's meter prints of ten steps, of ten samples each."""
    start = {"world_size": ranks, "unit": "samples", "source": "meter", "work_source": "counted"}
    window = {"step": 10, "steps": 10, "wall_s": 100 / rate, "work": 100}
    ended = {"status": end, "reason": "rank 0: ValueError: no"}
    common = {"v": 1, "study": "", "run_id": "", "attempt": attempt, "rank": 0, "t": rate}
    kinds = {"run_start": start, "window": window, "run_end": ended, **more}
    made = [{**common, "seq": n, "kind": k, **r} for n, (k, r) in enumerate(kinds.items())]
    return "".join(f"[METRIC] {encode(record)}\n" for record in made)


def test_ranks_of_which_one_counted_are_compared_in_steps() -> None:
    found = collected(gpu1=meter(1), gpu4=meter(4))
    assert list(found.runs["throughput"]) == pytest.approx([6.4, 6.4])
    assert set(found.runs["throughput_unit"]) == {"steps/s"}
    assert [w for w in found.warnings() if "not compared: steps/s do not say" in w]
    assert not [size.efficiency for size in found.sizes if size.efficiency]
    found = collected("--scaling", "strong")
    assert not [w for w in found.warnings() if "not compared" in w]
    assert verdict(found, "GPUs")[-1] == "All 2 runs ok."
    found = collected("--unit", "tokens", "--work-per-step", "4096")
    assert list(found.runs["throughput"]) == pytest.approx([6.4 * 4096] * 2)
    assert set(found.runs["throughput_unit"]) == {"tokens/s"}
    known = "is not known: repeat run, or collect --logs, with --scaling; what is ok does not run"
    assert known in proposal_table(found, "GPUs").notes[0]


def test_a_rate_that_each_rank_prints_is_of_one_or_of_all_and_not_compared() -> None:
    lines = [f"[METRIC] step={n} tokens_per_s=1,000.0\n" for n in range(1, 9)]
    each = "".join(2 * line for line in lines)
    runs = collected(gpu1="".join(lines), gpu2=each).runs
    assert list(runs["status"]) == ["ok", "failed"] and runs["throughput"][0] == 1000
    assert "printed 2 times, as by all 2 ranks" in runs["reason"][1]
    # Two lines of a step, which say different things.
    two = "".join(f"[METRIC] step={n} {w}\n" for n in (1, 2) for w in ("tokens_per_s=900", "lr=1"))
    assert list(collected(gpu2=two).runs["throughput"]) == [1000, 900]
    each = each.replace("tokens_per_s", "tokens_per_s_per_rank")
    found = collected("--scaling", "weak", gpu2=each)
    assert list(found.runs["throughput"]) == [1000, 2000]
    assert set(found.scaling["scaling"]) == {"weak"}
    third = each.replace("step", "rank=3 step")
    assert "no line of rank 0 has a time or rate" in collected(gpu2=third).runs["reason"][1]
    other = third.replace("1,000", "500")  # as rank 0 alone says it
    assert list(collected(gpu2=other + "".join(lines)).runs["throughput"]) == [1000, 1000]


def test_the_values_of_an_epoch_are_columns_and_identify_nothing() -> None:
    values = {"bleu": 12.5, "val_loss": 9.0, "run_id": 7, "images_per_s": 5.0, "world_size": 3}
    # Some programs number their epochs from 1.
    for first in (0, 1):
        lines = [f"[METRIC] epoch={first + n} images_per_s=5 val_accuracy={n}\n" for n in range(3)]
        assert collected(gpu1="".join(lines)).sizes[0].epochs_to_accuracy == 3
    found = collected(gpu1=meter(1, epoch={"epoch": 0, "val_loss": 0.25, "values": values}))
    (row,) = found.epochs.to_dict("records")
    assert (row["bleu"], row["val_loss"], row["world_size"]) == (12.5, 0.25, 1)
    assert row["run_id"] != 7 and "values" not in row
    assert found.runs["throughput_unit"].tolist() == ["samples/s"]  # as the windows say it
    assert not [w for w in found.warnings() if "no table" in w]


def test_a_second_training_in_a_log_is_told_and_not_mixed_in() -> None:
    found = collected(gpu1=meter(1, 100.0) + meter(1, 1000.0))
    assert list(found.runs["throughput"]) == pytest.approx([100.0])
    (line,) = found.warnings()
    assert line.startswith("gpu1.log: 3 [METRIC] lines rejected, the first: of a second run")
    assert collected(gpu1=meter(1) + meter(1)).warnings() == []  # a copy is none
    copies = {f"copy{n}-gpu1": "[METRIC] step=1 step_time_s=9 samples_per_s=5\n" for n in (1, 2)}
    found = collected("--unit", "samples", "--work-per-step", "256", **copies)
    assert [*found.runs["run_id"]] == ["copy1-gpu1.log", "gpu1.log"]
    _, contradicts, copied = found.warnings()[:3]
    assert "rate x step time is 45, but the work of a step is 256: is" in contradicts
    assert copied == "copy2-gpu1.log: has the same content as copy1-gpu1.log: counted once"
    steps = [f"[METRIC] step={n} step_time_s={{}}\n" for n in range(5)]
    for times, said in (((1, 3), True), ((1, 1.02), False), ((1, 1.4, 1, 1.2), False)):
        lines = "".join(line.format(time) for line in steps for time in times)
        assert (
            "Does the log have a second training?" in str(collected(gpu4=lines).warnings())
        ) is said


def test_the_newest_attempt_says_how_a_run_ended() -> None:
    logs = {
        "gpu1": meter(1, end="failed") + TRACEBACK + meter(1, attempt=1),
        "gpu2": meter(1) + TRACEBACK + meter(1, attempt=1, end="failed"),
        "gpu3": TRACEBACK + meter(1),
        "gpu4": meter(1).rsplit("[METRIC]", 1)[0] + TRACEBACK,
    }
    assert list(collected(**logs).runs["status"]) == ["ok", "failed", "ok", "failed"]
