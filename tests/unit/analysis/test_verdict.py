"""The five lines of the verdict: studies of known cause, sentences against the truth."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jobkit.analysis.collect.results import Results
from jobkit.analysis.collect.rows import steps_of_ranks
from jobkit.analysis.figures.by_size import ends_of, size_figure
from jobkit.analysis.figures.style import ON_MORE
from jobkit.analysis.findings.verdict import MAX_WORDS, verdict
from jobkit.analysis.report.tables import project_table, proposal_table
from jobkit.analysis.tables.columns import EPOCHS, RESULTS
from jobkit.analysis.tables.frames import frame
from jobkit.errors import UsageError
from support.measured_study import results_from, results_of, runs_of, step_fields

SIZES = (1, 2, 4, 8)
Change = Callable[[dict[str, Any]], Any]
Parts = Callable[[int], tuple[float, float, float]]


def study(
    efficiencies: Sequence[float],
    parts: Parts | None = None,
    change: Change = lambda row: None,
    repeats: int = 3,
    epochs: Callable[[int], Sequence[float]] = lambda n: (),
    **others: dict[int, list[float]],
) -> Results:
    """A study of ddp with 1 % noise, in a shuffled order, on five nodes.

    parts: compute, data wait and communication of a rank's iteration; change: edits a run's row;
    epochs: factors of the rate of its epochs.
    """
    noise = np.random.default_rng(1)
    curve = dict(zip(SIZES, efficiencies, strict=True))
    rates = {
        n: [1000 * n * e * float(np.exp(0.01 * noise.standard_normal())) for _ in range(repeats)]
        for n, e in curve.items()
    }
    rows = runs_of({"ddp": rates, **others})
    for i, row in enumerate(rows):
        n, start = row["world_size"], 1.7e9 + 1000 * (7 * i % len(rows))
        row |= {"batch_size_per_rank": 512 // n, "devices": n, "node_list": f"n{i % 5}"}
        row |= {"device": "A100", "driver_version": "550", "git_commit": "a" * 40, "epochs_done": 3}
        row |= {"job_id": str(i), "start_time_s": start, "end_time_s": start + 900, "attempts": 1}
        if parts:
            compute, wait, sent = parts(n)
            fields = step_fields([compute] * n, [wait] * n, [0.0] * n, sent)
            row |= {f"breakdown_{k}": v for k, v in fields.items()}
        change(row)
    keys = ("run_id", "series", "world_size", "repeat")

    records = [
        {k: row[k] for k in keys}
        | {"epoch": i, "timed_images": 1000, "images_per_s": row["throughput"] * factor}
        for row in rows
        if row["throughput"]
        for i, factor in enumerate(epochs(row["world_size"]))
    ]
    return results_from(frame(rows, RESULTS), frame(records, EPOCHS))


def calm(n: int) -> tuple[float, float, float]:
    return 0.5 / n, 0.0, 0.0 if n == 1 else 0.002


def sending(n: int) -> tuple[float, float, float]:
    return 0.5 / n, 0.0, 0.04 * (1 - 1 / n)


def at_8(**values: Any) -> Change:
    return lambda row: row.update(values) if row["world_size"] == 8 else None


def failing(status: str, reason: str | None, from_repeat: int) -> Change:
    gone = {"status": status, "reason": reason, "throughput": None}
    return lambda row: at_8(**gone)(row) if row["repeat"] >= from_repeat else None


def learning(row: dict[str, Any]) -> None:
    row["val_accuracy"] = {1: 0.902, 2: 0.9, 4: 0.89, 8: 0.803}[row["world_size"]]


def two_kinds(row: dict[str, Any]) -> None:
    """Runs on one GPU had the slow nodes more often."""
    n, k = row["world_size"], row["repeat"]
    slow = k in {1: (0, 1, 2), 2: (1, 3), 4: (2,), 8: ()}[n]
    row["node_list"] = f"{'slow' if slow else 'fast'}{(n + k) % 3}"
    if slow:
        row["throughput"] *= 0.8


def in_order(row: dict[str, Any]) -> None:
    start = 1.7e9 + 3600 * (3 * SIZES.index(row["world_size"]) + row["repeat"])
    row |= {"start_time_s": start, "end_time_s": start + 1800}


def drifting(row: dict[str, Any]) -> None:
    row["throughput"] *= 1 - 0.1 * (row["start_time_s"] - 1.7e9) / 12_000


GOOD, LOW = (1, 0.98, 0.95, 0.92), (1, 0.98, 0.95, 0.743)
SENT = [1 / n / (1 / n + 0.08 * (1 - 1 / n)) for n in SIZES]
WARM = {8: (0.5, 0.8, 0.95, 1.05)}
# Of each study: texts of the first lines, in their order; texts that must not be there.
CASES: dict[str, tuple[Callable[[], Results], list[str], list[str]]] = {
    "data at every size": (
        lambda: study((1, 0.995, 0.99, 0.985), lambda n: (0.25 / n, 0.25 / n, 0.001)),
        ["Every size waits for data 49% to 50% of the time: mend that first. Request 8 GPUs"], []),
    "GPUs that are idle": (lambda: study(GOOD, None, lambda row: row.update(gpu_busy_mean=0.31)),
        ["The host is the limit: ", "31% of the time, so efficiency means nothing. Request"], []),
    "a faster serial run": (lambda: study((1, 0.99, 0.98, 0.965), single={1: [1250.0, 1245, 1255]}),
        ["Request 1 GPU with single.", "77% efficiency", "ddp on 1 is 20% slower than single"],
        ["7.7 times"]),
    "two of three failed": (
        lambda: study(GOOD, sending, failing("failed", "rank 3: NCCL timeout", 1)),
        ["Request 4 GPUs", "; on 8 GPUs 2 of 3 runs are not ok (NCCL timeout)",
         "10 of 12 runs ok."], ["Request 8"]),
    "all failed": (  # two of three alike, and the third is the last by its letters
        lambda: study(GOOD, sending, lambda row: failing("oom", (
            *["rank 3: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"] * 2,
            "rank 5: OSError: no space left")[row["repeat"]], 0)(row)),
        ["Request 4 GPUs", "on 8 GPUs 3 of 3 runs are not ok (CUDA out of memory)"],
        ["8 GPUs with"]),
    "a repeat that diverged": (
        lambda: study(GOOD, None, lambda row: row.update(
            val_loss=None if (row["world_size"], row["repeat"]) == (8, 1) else 0.4)),
        ["Request 8 GPUs", "; loss is NaN or missing in 1 of 3 runs on 8 GPUs"], ["unchanged"]),
    "a series that learns less": (
        lambda: study(GOOD, None, lambda row: row.update(
            val_loss=1.5, val_accuracy=0.8 if row["series"] == "ddp" else 0.9), other={
            n: [900.0 * n] * 3 for n in SIZES}),
        ["Request 8 GPUs with ddp", "; accuracy is 80.0%, but 90.0% with other: tune first"],
        ["accuracy: unchanged"]),
    "other epochs": (lambda: study(GOOD, None, lambda row: row.update(
            val_loss=0.4, epochs_done=8 // row["world_size"])),
        ["; runs trained for 1 to 8 epochs: losses are not compared"], ["unchanged"]),
    "one run of a size": (
        lambda: study((1, 0.98, 0.95, 0.6), None, failing("failed", None, 3), 1, more={
            1: [990.0, 995], 8: [7000.0, 7010]}),
        ["seems to fall below 80% at 8 GPUs"], []),
    "restarts": (lambda: study(GOOD, None, at_8(attempts=3)),
        ["; 3 of 12 runs had to be started again"], []),
    "a cold first epoch": (lambda: study((1, 0.98, 0.95, 0.75), epochs=lambda n: (
            (1.0,) * 3 if n < 8 else (0.4, 1.2, 1.2))),
        ["; a slow first epoch adds 67% to training: train longer", "seems to fall"], []),
    "no cache does that": (lambda: study((1, 0.98, 0.95, 2.5)),
        ["% on 8 GPUs is above ideal: check units and scaling", "seems to stay"], []),
    "other devices": (lambda: study((1, 0.98, 0.95, 0.461), calm, at_8(device="V100")),
        ["8 GPUs had another device (V100, not A100)", "seems to fall below 80% at 8 GPUs: 46%",
         "96% of the loss is outside of what was measured; another device"], ["because"]),
    "another driver in one run": (
        lambda: study((1, 0.98, 0.95, 0.789), calm, lambda row: row["repeat"] or at_8(
            driver_version="535")(row)),
        ["8 GPUs had another driver in some runs (535)", "what was measured; another driver in"],
        ["because", "nothing"]),
    "load of other programs at one size": (lambda: study(LOW, calm, lambda row: row.update(
            other_load_mean=0.3 if row["world_size"] == 8 else 0.0)),
        ["Other processes used up to 30% of the cores in 3 of 12 runs",
         "what was measured; other programs used 30% of the cores, 0% before"],
        ["because", "nothing", "8 GPUs had"]),
    "other programs at all sizes": (
        lambda: study(LOW, lambda n: (0.5 / n, 0.5 / n, 0.0), lambda row: row.update(
            other_load_mean=0.6, device_type="cpu", breakdown_late_rank=1,
            breakdown_late_host="vm", breakdown_late_cause="host")),
        ["Other processes used up to 60% of the cores in 12 of 12 runs (most in ",
         "): measure again on an idle machine. Until then nothing can be requested.",
         "; no cause is named while other programs use the cores; measured, not certain: rank 1 ",
         "on vm is late (host), see why.png."], ["Request", "because", "data"]),
    "two sizes failed": (
        lambda: study(GOOD, sending, lambda row: failing("failed", "rank 3: NCCL timeout", 1)(
            row) if row["world_size"] != 4 else row.update(
            status="oom", reason="CUDA out of memory", throughput=None)),
        ["Request 2 GPUs", "on 4 GPUs 3 of 3 runs are not ok", "at 92% efficiency (1 of 3 runs)",
         "up to 8 GPUs: 92% [89, 95 at 95%] (1 of 3 runs)."], []),
    "one cancelled, one failed, one waits": (lambda: study(GOOD, sending, lambda row: failing(*(
            ("cancelled", "Slurm job 7: CANCELLED by 1000"), ("pending", None),
            ("failed", "rank 3: exit code 1"))[row["repeat"]], 0)(row)),
        ["on 8 GPUs 3 of 3 runs are not ok (exit code 1)"], ["CANCELLED", "pending"]),
    "all caveats that stand with the request": (
        lambda: study((1, 0.9, 0.805, 0.6), sending, lambda row: (learning(row), at_8(
            driver_version="535")(row), failing("failed", "NCCL timeout after an hour", 2)(row))),
        ["; undecided whether above 80%: repeat 1 and 4 GPUs; on 8 GPUs 1 of 3 runs are not ok (",
         "NCCL timeout after an hour); accuracy falls from 90.2% to 89.0% on 4 GPUs: tune first.",
         "Efficiency seems to fall below 80% at 8 GPUs: 60% [59, 61 at 95%] (2 of 3 runs).\n",
         "\n11 of 12 runs ok."], []),
    "more to say than 100 words": (
        lambda: study((1, 0.95, 0.81, 0.74), calm, lambda row: row.update(
            other_load_mean=0.3 if row["world_size"] == 8 else 0.0, epochs_done=3, val_loss=1.0,
            val_accuracy=0.9, python_version="3.12" if row["world_size"] == 8 else "3.11"),
            repeats=1),
        ["measure again on an idle machine. Request 4 GPUs with ddp", "; one run a size: "], []),
    "GPUs that others use": (lambda: study(GOOD, calm, lambda row: row.update(gpu_processes_max=2)),
        ["GPUs of 12 runs"], []),
    "a small machine that is busy": (lambda: study((1, 0.7, 0.6, 0.5), calm, lambda row: row.update(
            device_type="cpu", threads_used=8 // row["world_size"],
            other_load_mean=0.2 if row["world_size"] == 2 else 0.0), repeats=1),
        ["Request 1 GPU with ddp; 8 GPUs had another thread count (1, not 8: set --threads 1)",
         "; another thread count (4, not 8: set --threads 1), other programs used 20%"], []),
    "a program on a small machine": (lambda: study((1, 0.7, 0.6, 0.5), calm, lambda row: row.update(
            device_type="cpu", threads_used=8 // row["world_size"], strategy="train"), repeats=1),
        ["(1, not 8: set OMP_NUM_THREADS=1, another --name)"], []),
    "time between the steps": (lambda: study(LOW, calm),
        ["falls below 80% at 8 GPUs: 74%", "of the loss is outside of what was measured; no "],
        ["because"]),
    "a warm-up left in": (
        lambda: study(LOW, calm, epochs=lambda n: WARM.get(n, (0.9, 0.99, 1, 1.01))),
        ["rates still rise by 31% within runs, as in a warm-up: train longer", "seems to fall"],
        ["because"]),
    "communication": (lambda: study(SENT, sending),
        ["falls below 80% at 8 GPUs: 64%", ", because exposed communication takes 36% of the step"],
        ["outside"]),
    "an interval so wide that any cause would be within it": (
        lambda: study((1, 0.98, 0.95, 0.72), lambda n: (0.5 / n, 0.0, 0.0024 * (n > 4)),
                      lambda r: r.update(throughput=r["throughput"] * 2 ** (r["repeat"] - 1))),
        ["seems to fall below 80% at 8 GPUs", "of the loss is outside of what was measured"],
        ["because"],
    ),
    "two kinds of nodes": (lambda: study((1, 0.98, 0.95, 0.935), sending, two_kinds, repeats=5),
        ["runs on slow0, slow1, slow2 are 20% slower: without them parallel efficiency is 93"], []),
    "sizes in their order": (lambda: study((1, 0.95, 0.9, 0.845), calm, in_order),
        ["sizes ran in their order, so a drift looks like scaling", "seems to stay above"], []),
    "a drift": (lambda: study(GOOD, calm, drifting), ["rates drift by -10% over the study"], []),
    "repeats that share nodes": (
        lambda: study(GOOD, calm, lambda row: row.update(node_list=f"n{row['world_size']}")),
        ["; repeats shared their nodes: intervals are too narrow", "seems to stay above 80%"], []),
    "repeats of one size that share nodes": (lambda: study(GOOD, calm, at_8(node_list="n1,n2")),
        ["; repeats on 8 GPUs shared their nodes: intervals are too narrow", "seems to stay"], []),
    "times with the start of the program": (lambda: study((1, 0.98, 0.95, 0.721), calm, lambda row:
            row.update(throughput_source="pattern x (one rate, start-up included)")),
        ["; rates are of whole runs, start-up included", "seems to fall"], []),
    "no faster on more": (lambda: study((1, 0.98, 0.95, 0.476)),
        ["Fastest: ddp on 8 GPUs", "efficiency; ddp on 4 GPUs may be as fast."], []),
    "jobs that share nodes": (lambda: study(GOOD, calm, lambda row: row.update(start_time_s=1.7e9)),
        ["12 runs shared nodes (n0, n1, n2, n3 and 1 more) with others: use --exclusive"], []),
    "one run of each": (lambda: study((1, 0.95, 0.9, 0.845), calm, repeats=1),
        ["undecided whether above 80%: repeat 1 and 8 GPUs; one run a size: differences may be"],
        ["["]),
    "a slow base": (lambda: study((1, 1.2, 1.3, 1.54), calm),
        ["154% on 8 GPUs is above ideal: repeat the base, 1 GPU"], ["fall"]),
    "runs without a rate": (
        lambda: study(GOOD, calm, lambda row: row["repeat"] == 2 and row["world_size"] > 2 and
            row.update(throughput=None, step_time_s=0.1 if row["world_size"] == 4 else None)),
        ["8 GPUs with ddp: 7.", "; 1 of 12 runs show no optimizer step, though others do: do ",
         " write into {run_dir}; 1 rate left out: in another unit, or of the"], ["Loss"]),
    "nothing wrong": (lambda: study(GOOD, calm),
        ["Request 8 GPUs with ddp: 7.36 times 1 GPU, parallel efficiency 92% [90, 94 at 95%], ",
         "6.77 s and 0.0019 node-hours per epoch.",
         "Fastest: ddp on 8 GPUs, 7,382 images/s at 92% efficiency.",
         "Efficiency stays above 80% up to 8 GPUs: 92% [90, 94 at 95%].", "All 12 runs ok."],
        ["because", "undecided"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_study_of_known_cause_gets_the_lines_of_an_expert(name: str) -> None:
    make, texts, never = CASES[name]
    results = make()
    said = verdict(results, "GPUs")
    page, at = "\n".join(said), 0
    for text in texts:
        assert text in page[at:], page
        at += page[at:].index(text)
    assert not [text for text in never if text in page]
    assert len(said) <= 5 and len(page.split()) <= MAX_WORDS
    # The table that is handed in has the caveats too.
    table = proposal_table(results, "GPUs").latex().replace("\\", "").replace("{[}", "[")
    first = said[0].rstrip(".").split("; ")[1:]
    assert not [c for c in first if not c.startswith("undecided") and c[1:] not in table]


@pytest.mark.parametrize(
    ("rates", "texts"),
    [
        # The base is named where it is not one GPU; of equal ones it is the series' own.
        ({"ddp": {2: [100.0, 101, 99], 4: [183.0, 182, 184]}}, ["1.83 times 2 GPUs, parallel"]),
        ({"ddp": {2: [150.0, 151], 4: [290.0, 291]}, "single": {1: [80.0, 81]}},
         [": 3.61 times single on 1 GPU, parallel efficiency 90%"]),
        ({"ddp": {1: [99.0, 102], 2: [190.0, 191]}, "single": {1: [100.0, 103]}},
         ["Request 2 GPUs with ddp: 1.90 times 1 GPU,"]),
        ({"single": {1: [100.0, 101]}, "ddp": {2: [150.0, 151], 4: [280.0, 281]}},
         ["ddp: 75% [73, 76 at 95%]); what it is lost to was not measured"]),
        ({"ddp": {1: [1000.0], 3: [2400.0]}}, ["Request 3 GPUs with ddp: 2.40 times 1 GPU"]),
        # An efficiency near the threshold has a decimal.
        ({"ddp": {1: [99.7, 100, 100.3], 4: [317.4, 318.4, 319.4]}},
         ["at 79.6% efficiency", "at 4 GPUs: 79.6% [79, 80.3 at 95%]"]),
        ({"ddp": {1: [1e9] * 2, 2: [1.9e9] * 2}}, ["efficiency 95% [95, 95 at 95%].\n"]),
        ({"ddp": {4: [300.0]}, "fsdp": {4: [200.0]}},
         ["No size to request: only one was measured"]),
        # Where the interval has the threshold in it nothing is sure.
        ({"ddp": {1: [100.0, 103], 2: [155.0, 162]}}, ["seems to fall below 80% at 2 GPUs: 78%"]),
        # A size beyond a dip is requested where it is certain.
        ({"ddp": {1: [100.0, 100.2], 2: [154.0, 154.2], 4: [340.0, 340.5], 8: [688.0, 689.0]}},
         ["Request 8 GPUs with ddp: 6.88 times 1 GPU", "falls below 80% at 2 GPUs: 77%"]),
        ({"ddp": {n: [0.8 * x, x, 1.2 * x] for n, x in ((1, 100.0), (2, 154.0), (4, 340.0))}},
         ["Request 1 GPU with ddp.\n"]),
        # Nothing slower than another series on as many GPUs is requested: the efficiency of a
        # series with a slow base is high.
        ({"ddp": {1: [1000.0], 4: [3400], 16: [5700]}, "fsdp": {1: [700.0], 4: [2700], 8: [5200]}},
         ["Request 4 GPUs with ddp"]),
        ({"ddp": {2: [200.0], 4: [300.0]}, "fsdp": {2: [145.0], 4: [280.0]}},
         ["Request 2 GPUs with ddp"]),
        # What may be as fast is named; without repeats all within 5 %.
        ({"ddp": {1: [1000.0, 990], 4: [3400.0, 3440], 8: [3420.0, 3470]},
          "fsdp": {1: [700.0, 701], 8: [3410.0, 3390], 16: [3430.0, 3450]}},
         ["ddp on 8 GPUs, 3,445 images/s at 43% efficiency; ddp on 4 GPUs, fsdp may be as fast."]),
        ({"ddp": {1: [100.0], 2: [195.0]}, "fsdp": {1: [100.0], 2: [190.0]}},
         ["98% efficiency; fsdp may be as fast."]),
        ({"ddp": {1: [100.0], 2: [195.0]}, "fsdp": {1: [100.0], 2: [150.0]}}, ["98% efficiency."]),
    ],
)  # fmt: skip
def test_what_lines_say_of_rates(rates: dict[str, dict[int, list[float]]], texts) -> None:
    lines = verdict(results_of(rates), "GPUs")
    page = "\n".join(lines)
    assert "." not in lines
    assert not [text for text in texts if text not in page], page


@pytest.mark.parametrize(("cause", "word"), [("compute", "computes"), ("host", "runs host code")])
def test_the_steps_of_any_program_say_why_and_which_rank_is_late(cause, word) -> None:
    """Of a step on 8 ranks rank 5 is busy 60 % longer, and the others wait for it."""
    rows = runs_of({"train": {1: [100.0, 101], 8: [505.0, 506]}})
    for row in rows:
        n = row["world_size"]
        fields = step_fields([1.0] * 7 + [1.6] if n > 1 else [1.0])
        row |= {f"breakdown_{k}": v for k, v in fields.items()} | {"global_batch_size": None}
        row |= {"breakdown_late_rank": 5 if n > 1 else None, "breakdown_late_host": "nid7"}
        row |= {"breakdown_late_cause": cause}
        row |= {"step_time_s": fields["iteration_s"], "throughput_unit": "samples/s"}
        row |= {"strategy": "train", "scaling": "weak"}
    (line,) = (x for x in verdict(results_from(frame(rows, RESULTS)), "GPUs") if "below" in x)
    assert f", because rank 5 on nid7 {word} 60% longer than the others" in line


def test_single_is_the_base_where_another_serial_run_may_be_faster_by_chance() -> None:
    def lines(fsdp: dict[int, list[float]]) -> list[str]:
        once = {"single": {1: [97.0]}, "ddp": {1: [88.0], 2: [134.0]}, "fsdp": fsdp}
        rows = [r | {"devices": r["world_size"], "strategy": r["series"]} for r in runs_of(once)]
        return verdict(results_from(frame(rows, RESULTS)), "GPUs")

    near, faster = lines({1: [100.0], 2: [110.0]}), lines({1: [110.0], 2: [120.0]})
    assert near[0].startswith("Request 1 GPU with single; ")
    assert near[2].startswith("Efficiency seems to fall below 80% at 2 GPUs (ddp: 69%)")
    assert faster[0].startswith("Request 1 GPU with fsdp; ")


def test_runs_that_go_on_have_not_failed() -> None:
    rows = runs_of({"ddp": {1: [100.0, 101], 2: [190.0, 1.0], 4: [1.0, 1.0]}})
    for row, status in zip(rows[-3:], ("running", "pending", "running"), strict=True):
        row |= {"status": status, "reason": "process 22486", "throughput": None}
    page = "\n".join(verdict(results_from(frame(rows, RESULTS)), "GPUs"))
    assert "; on 4 GPUs 2 of 2 runs have not ended (pending)" in page and "failed" not in page
    assert page.endswith("3 of 6 runs ok.")
    rows += runs_of({"fsdp": {1: [200.0, 201], 2: [390.0, 391]}})
    last = verdict(results_from(frame(rows, RESULTS)), "GPUs")[-1]
    assert last == "7 of 10 runs ok; on 4 GPUs with ddp 2 of 2 runs have not ended (pending)."


def test_a_series_that_is_not_compared_keeps_no_other_from_being_requested() -> None:
    rows = runs_of({"a": {1: [1000.0, 1001], 2: [1900.0, 1901]}})
    rows[-1] |= {"precision": "bf16"}
    rows += runs_of({"b": {1: [900.0, 901], 2: [1700.0, 1701]}})
    both = verdict(results_from(frame(rows, RESULTS)), "GPUs")
    assert both[0].startswith("Request 2 GPUs with b: 1.89 times 1 GPU")
    assert both[1].startswith("Fastest: b on 2 GPUs")
    alone = verdict(results_from(frame(rows[:4], RESULTS)), "GPUs")
    assert alone[0].startswith("Nothing can be requested: not compared: precision differs")
    at = {1: None, 2: "none"}
    copied = [row | {"ranks_together": at[row["world_size"]]} for row in rows[4:]]
    lines = verdict(results_from(frame(copied, RESULTS)), "GPUs")
    assert not [line for line in lines if line.startswith("Fastest")], "copies are not fast"
    copies = "The 2 ranks of b are copies of one program: give it DDP, or state --together. "
    assert lines[0] == f"{copies}Nothing can be requested: not compared: 2 copies."
    mixed = verdict(results_from(frame(rows[:2] + copied, RESULTS)), "GPUs")
    assert mixed[0].startswith(copies)


def test_the_request_follows_the_sizes_on_the_fewest_nodes() -> None:
    """It was "Request 4 GPUs on 2 nodes: speed-up 0.88", as 4 on 4 nodes are below 80 %."""
    rates = {(4, 1): 400, (4, 2): 350, (4, 4): 280, (8, 1): 790, (8, 2): 700, (16, 1): 1584}
    rows = [
        row | {"nodes": nodes, "ranks_per_node": n // nodes, "run_id": f"{row['run_id']}-{nodes}"}
        for (n, nodes), rate in rates.items()
        for row in runs_of({"ddp": {n: [rate, 1.002 * rate, 0.998 * rate]}})
    ]
    results = results_from(frame(rows, RESULTS))
    both = verdict(results, "GPUs")
    assert both[0].startswith("Request 16 GPUs with ddp: 3.96 times 4 GPUs")
    assert not [line for line in both if "below" in line]
    assert "; 4 GPUs on 2 nodes: 88%; 4 GPUs on 4 nodes: 70%." in "\n".join(both)
    figure = size_figure(results, "throughput")
    hollow = [x for x in figure.axes[0].lines if x.get_label() == ON_MORE] if figure else []
    assert [list(mark.get_xdata()) for mark in hollow] == [[4], [4], [8]]


def test_a_study_of_failed_runs_says_why_and_names_its_time_as_one_without() -> None:
    rows = runs_of({"train": {1: [1671.0], 2: [1.0], 4: [1.0]}})
    for row in rows:
        row |= {"throughput": None, "train_samples": None}
        row |= {"status": "failed", "reason": "rank 0: ModuleNotFoundError: No module named 'foo'"}
    nothing = results_from(frame(rows, RESULTS))
    lines = verdict(nothing, "GPUs")
    assert lines[0].endswith("no successful run has a rate.")
    assert lines[1].startswith("0 of 3 runs ok; on 4 GPUs 1 of 1 runs are not ok (No module named")
    rows[0] |= {"status": "ok", "throughput": 1671.0, "throughput_unit": "runs/h"}
    results = results_from(frame(rows, RESULTS))
    assert {(s.time_of, s.throughput_unit) for s in results.sizes} == {("run", "runs/h")}
    assert "time per run, start-up included (s)" in proposal_table(results, "GPUs").heads
    assert "; on 4 GPUs 1 of 1 runs are not ok (" in verdict(results, "GPUs")[0]
    assert proposal_table(nothing, "GPUs").notes[0].endswith(" No size is compared with another.")


def test_dp_counts_as_the_gpus_that_it_computes_on() -> None:
    series = {"ddp": {1: [100.0, 101, 99], 2: [190.0, 191, 189]}, "dp": {1: [380.0, 381, 379]}}
    runs = frame(runs_of(series), RESULTS)
    runs["devices"] = runs["world_size"].where(runs["series"] != "dp", 4)
    runs["strategy"] = runs["series"]
    with_dp = results_from(runs)
    assert verdict(with_dp, "GPUs")[1].startswith("Fastest: dp on 4 GPUs, ")
    table = proposal_table(with_dp, "GPUs")
    assert {(*row[:2],) for row in table.rows} == {("ddp", "1"), ("ddp", "2"), ("dp", "4")}
    (dp,) = [size for size in with_dp.sizes if size.series == "dp"]
    low, high = ends_of(dp, "throughput_per_rank") or (0, 0)
    assert low < 95 < high and dp.throughput_per_rank == 95


Values = dict[str, dict[int, Sequence[float]]]  # by series and ranks: of each repeat


def test_steps_of_unknown_work_are_not_compared() -> None:
    """Each rank's own batch makes equal steps ideal in weak scaling, and halves them in strong."""
    rows = runs_of({"train": {1: [10.0, 10.1], 2: [9.9, 10.0]}}, None)
    rows = [row | {"throughput_unit": "steps/s", "strategy": "train"} for row in rows]
    said = verdict(results_from(frame(rows, RESULTS)), "ranks")
    first = "Nothing can be requested: not compared: steps/s do not say whether a step's work grows"
    assert said[0] == f"{first} with the ranks: state --scaling weak or strong."
    weak = [steps_of_ranks(row | {"scaling": "weak"}) for row in rows]
    of_ranks = results_from(frame(weak, RESULTS))
    assert len(project_table(of_ranks, "1e6 rank-steps", 1, "ranks").rows) == 2
    page = "\n".join(verdict(of_ranks, "ranks"))
    assert "Request 2 ranks with train: 1.98 times 1 rank, parallel efficiency 99%" in page
    assert "rank-steps/s" in page


def learnt(name: str, values: Values, accuracies: Values | None = None) -> Results:
    """A study whose runs have these values in a column."""
    rates = {k: {n: [100.0 * n] * len(x) for n, x in of.items()} for k, of in values.items()}
    rows = runs_of(rates)
    for row in rows:
        row |= {"epochs_done": 3, "devices": row["world_size"]}
        for column, of in ((name, values), ("val_accuracy", accuracies or {})):
            if of:
                row[column] = of[row["series"]][row["world_size"]][row["repeat"]]
    return results_from(frame(rows, RESULTS))


def test_loss_and_accuracy_differ_where_the_ranges_of_the_repeats_do() -> None:
    loss = {"ddp": {1: [1.50, 1.51, 1.49], 2: [9.0, 9.0, 9.0], 4: [1.80, 1.81, 1.79]}}
    right = {"ddp": {1: [0.50, 0.52, 0.48], 2: [0.1, 0.1, 0.1], 4: [0.49, 0.51, 0.50]}}
    found = verdict(learnt("val_loss", loss, right), "GPUs")
    assert "; accuracy falls from 50.0% to 10.0% on 2 GPUs: tune first" in found[0]
    assert "Loss rises from 1.5 to 9 on 2 GPUs (ddp)." in found
    del loss["ddp"][2], right["ddp"][2]
    found = verdict(learnt("val_loss", loss, right), "GPUs")
    assert "; loss rises from 1.5 to 1.8 on 4 GPUs: tune first" in found[0]
    assert "Accuracy: unchanged." in found
    diverged = {"ddp": {1: [0.3], 2: [float("nan")], 4: [0.3]}}
    found = verdict(learnt("val_loss", diverged, diverged), "GPUs")
    assert "; accuracy is NaN or missing on 2 GPUs: tune first" in found[0]
    assert "Loss is NaN or missing on 2 GPUs (ddp)." in found
    for same, text in ((0.0, "Loss: unchanged."), (-9.0, "Loss falls from -9 to -9.9 on 2 GPUs")):
        found = verdict(learnt("val_loss", {"ddp": {1: [same], 2: [1.1 * same]}}), "GPUs")
        assert text in " ".join(found) and "tune" not in found[0]
    # The table that is handed in says it of each series; the verdict of the one to request.
    other = learnt("val_accuracy", {"ddp": {1: [0.9], 2: [0.9]}, "fsdp": {1: [0.9], 2: [0.8]}})
    note = "fsdp: accuracy falls from 90.0% to 80.0% on 2 GPUs: tune first."
    assert note in proposal_table(other, "GPUs").notes and note[6:] not in verdict(other, "GPUs")[0]
    once = verdict(learnt("val_accuracy", {"ddp": {1: [0.9], 2: [0.8]}}), "GPUs")
    assert "; accuracy falls from 90.0% to 80.0% on 2 GPUs: tune first" in once[0]


def test_losses_of_unlike_runs_are_not_compared() -> None:
    runs = learnt("val_loss", {"ddp": {1: [1.5], 2: [1.6]}}).runs
    assert "Loss rises" in " ".join(verdict(results_from(runs), "GPUs"))
    for column, value in (("epochs_done", 2), ("model", "mlp"), ("status", "failed")):
        unlike = runs.copy()
        unlike.loc[runs["world_size"] == 2, column] = value
        assert "Loss" not in " ".join(verdict(results_from(unlike), "GPUs")), column


def test_which_series_needs_the_least_memory() -> None:
    peaks = {
        "ddp": {1: [900.0] * 3, 4: [8000.0, 8010.0, 7990.0]},
        "fsdp": {1: [950.0] * 3, 4: [400.0, 401.0, 399.0]},
        "single": {1: [100.0] * 3},
    }
    results = learnt("peak_memory_mib", peaks)
    assert "Least memory on 4 GPUs: fsdp 400 MiB, most ddp 7.8 GiB." in verdict(results, "GPUs")
    full = results.runs.copy()
    full.loc[(full["series"] == "ddp") & (full["world_size"] == 4), "status"] = "oom"
    lines = verdict(results_from(full), "GPUs")
    assert any("Least memory on 4 GPUs: fsdp 400 MiB; ddp ran out of memory." in x for x in lines)
    results.runs.loc[results.runs["series"] != "ddp", "device_type"] = "cpu"
    dp = learnt("peak_memory_mib", {"dp": {1: [800.0]}, "single": {1: [400.0]}})
    dp.runs.loc[dp.runs["series"] == "dp", "devices"] = 4
    near = {"ddp": {2: [1140.0]}, "fsdp": {2: [1100.0]}}
    overlapping = {"ddp": {2: [700.0, 900.0]}, "fsdp": {2: [800.0, 810.0]}}
    few = (learnt("peak_memory_mib", peaks) for peaks in (overlapping, near))
    for unlike in (results, dp, *few):
        page = verdict(results_from(unlike.runs), "GPUs")
        assert not any("memory" in line for line in page)


def test_the_hours_of_a_whole_project() -> None:
    """Three runs of 10 epochs of 50,000 images at 180 images/s: 2.31 hours on two GPUs."""
    results = results_of({"ddp": {1: [100.0, 101, 99], 2: [180.0, 181, 179]}})
    table = project_table(results, "10 epochs", 3, "GPUs")
    assert table.rows[1][:3] == ["ddp", "2", "1"] and table.rows[1][4:6] == ["4.63", "2.315"]
    again = project_table(results, "0.5e6 images", 3, "GPUs")
    assert again.rows == table.rows
    low, high = (float(x) for x in table.rows[1][6].split(" to "))
    assert low < 2.315 < high
    for work, words in (("10 tokens", "the study measured images"), ("x", "as '300e9 tokens'")):
        with pytest.raises(UsageError, match=words):
            project_table(results, work, 1, "GPUs")


def test_samples_that_are_inferred_are_said() -> None:
    runs = results_of({"train": {1: [100.0], 2: [200.0]}}).runs
    for sources, said in (
        (["inferred"] * 2, "samples are inferred from the batches: state --work-per-step"),
        (["inferred", "stated"], "in 1 of 2 runs: "),
        (["counted", "stated"], ""),
    ):
        first = verdict(results_from(runs.assign(work_source=sources)), "GPUs")[0]
        assert said in first and ("inferred" in first) is bool(said)


def test_of_several_kinds_of_rates_the_first_is_told_and_the_others_are_named() -> None:
    rows = []
    for scaling, unit in (("strong", "x/s"), ("weak", "x/s"), (None, "y/s")):
        rates = {1: [100.0, 101.0], 2: [190.0, 191.0], 4: [300.0, 301.0]}
        own = runs_of({f"{unit} {scaling or 'z'}": rates}, scaling)
        named = {"dataset": "cifar10" if scaling else None}  # of none there is nothing to say
        rows += [row | {"throughput_unit": unit} | named for row in own]
    lines = verdict(results_from(frame(rows, RESULTS)), "GPUs")
    assert lines[0].startswith("Request 2 GPUs with x/s strong: ")
    words = " The table has unstated scaling in y/s, weak scaling in x/s too."
    assert lines[0].endswith(words) and "weak" not in "".join(lines[1:])


def test_rates_of_two_models_are_not_ranked() -> None:
    rates = {1: [100.0, 101.0], 2: [190.0, 191.0]}
    large = {n: [9 * x for x in own] for n, own in rates.items()}
    runs = results_of({"ddp, cnn": rates, "ddp, mlp": large}).runs
    lines = verdict(results_from(runs.assign(model=runs["series"].str[5:])), "GPUs")
    assert lines[0].startswith("Request 2 GPUs with ddp, cnn: ")
    assert lines[0].endswith(" The table has mlp too.") and "mlp" not in "".join(lines[1:])


def test_how_long_gpus_compute_stands_beside_every_efficiency() -> None:
    results = study(GOOD, None, lambda row: row.update(gpu_busy_mean=0.31))
    lines = [line for line in verdict(results, "GPUs") if "fficiency" in line]
    assert [line.count("(GPUs busy 31%)") for line in lines] == [1, 1, 1], lines
    table = proposal_table(results, "GPUs")
    busy, efficiency = (table.heads.index(name) for name in ("GPU busy", "parallel efficiency"))
    assert [row[busy] for row in table.rows] == ["31%"] * 4 and busy - efficiency == 1
