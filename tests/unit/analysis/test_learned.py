"""The sentences on validation loss, accuracy and memory: true, and silent where nothing says it."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.learned import learned
from jobkit.analysis.findings.memory_needed import memory_needed
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from support.measured_study import results_from, runs_of

Values = dict[str, dict[int, Sequence[float]]]  # by series and ranks: of each repeat


def study(name: str, values: Values, more: Values | None = None, **fixed: Any) -> Results:
    """A study whose runs have these values in a column; more: accuracies."""
    rates = {k: {n: [100.0 * n] * len(x) for n, x in of.items()} for k, of in values.items()}
    rows = runs_of(rates)
    for row in rows:
        place = row["series"], row["world_size"], row["repeat"]
        row |= {"epochs_done": 3, "devices": row["world_size"]} | fixed
        row[name] = values[place[0]][place[1]][place[2]]
        if more:
            row["val_accuracy"] = more[place[0]][place[1]][place[2]]
    return results_from(frame(rows, RESULTS))


def test_loss_and_accuracy_at_the_smallest_and_the_largest_size() -> None:
    loss = {"ddp": {1: [1.50, 1.51, 1.49], 2: [9.0, 9.0, 9.0], 4: [1.80, 1.81, 1.79]}}
    right = {"ddp": {1: [0.50, 0.52, 0.48], 2: [0.1, 0.1, 0.1], 4: [0.49, 0.51, 0.50]}}
    (line,) = learned(study("val_loss", loss, right), "GPUs")
    assert line.startswith("ddp on 1 GPU and on 4 GPUs: final validation loss 1.5 and 1.8, +20.")
    assert "; accuracy 50.0% and 50.0%, +0.0 points [95%: -" in line
    assert line.endswith("The loss differs by more than the repeats vary.")
    ends = re.search(r"\+20\.\d% \[95%: \+([\d.]+)% to \+([\d.]+)%\]", line)
    assert ends and float(ends[1]) < 20 < float(ends[2])
    assert line in verdict(study("val_loss", loss, right), "GPUs")


def test_one_run_at_a_size_gives_numbers_and_no_judgement() -> None:
    once = study("val_loss", {"fsdp": {1: [1.5], 2: [1.8]}})
    (line,) = learned(once, "processes (ranks)")
    assert line == (
        "fsdp on 1 process and on 2 processes: final validation loss 1.5 and 1.8. "
        "Without repeats at both sizes a difference may be chance."
    )
    (line,) = learned(study("val_loss", {"fsdp": {1: [1.5, 1.6, 1.7], 2: [9.0]}}), "GPUs")
    assert line.endswith("Without repeats at both sizes a difference may be chance.")


def test_repeats_of_one_seed_that_are_equal_are_no_sample() -> None:
    (line,) = learned(study("val_loss", {"ddp": {1: [1.5, 1.5], 2: [1.6, 1.6]}}), "GPUs")
    assert "95%" not in line
    assert line.endswith("The repeats of a size are equal, so they do not show what chance does.")


def test_what_was_tested_is_named_and_what_was_not() -> None:
    loss = {"ddp": {1: [1.5, 1.6, 1.4], 2: [1.5, 1.61, 1.41]}}
    right = {"ddp": {1: [1.0] * 3, 2: [0.9] * 3}}
    (line,) = learned(study("val_loss", loss, right), "GPUs")
    assert "No difference of the loss is beyond the spread of the repeats (p = " in line
    assert line.endswith("The repeats of the accuracy are equal: it was not tested.")


def test_an_accuracy_above_1_is_no_share() -> None:
    percent = study("val_accuracy", {"ddp": {1: [93.1, 93.2], 2: [92.1, 92.0]}})
    (line,) = learned(percent, "GPUs")
    assert "accuracy 93.15 and 92.05, -1.1 [95%: " in line
    (warning,) = [line for line in percent.warnings() if "val_accuracy" in line]
    assert "val_accuracy is above 1 in 4 runs, as ddp-1-0: it is a share" in warning
    assert study("val_accuracy", {"ddp": {1: [1.0], 2: [0.9]}}).warnings() == []


def test_the_batch_of_weak_scaling_is_named() -> None:
    results = study("val_loss", {"ddp": {1: [1.5, 1.6], 2: [1.7, 1.8]}})
    runs = results.runs
    runs.loc[runs["world_size"] == 2, "global_batch_size"] = 1024
    (line,) = learned(results_from(runs.assign(scaling="weak")), "GPUs")
    assert line.startswith("ddp on 1 GPU and on 2 GPUs (global batch 512 and 1024): final")


def test_nothing_is_said_where_sizes_do_not_compare() -> None:
    assert learned(study("val_loss", {"ddp": {2: [1.5, 1.6]}, "single": {1: [1.5]}}), "GPUs") == []
    assert learned(study("train_loss", {"ddp": {1: [1.5], 2: [1.6]}}), "GPUs") == []
    assert learned(study("val_loss", {"ddp": {1: [0.0], 2: [1.6]}}), "GPUs") == []
    failed = study("val_loss", {"ddp": {1: [1.5], 2: [1.6]}}, status="failed")
    assert learned(failed, "GPUs") == []
    uneven = study("val_loss", {"ddp": {1: [1.5], 2: [1.6]}}).runs
    uneven.loc[uneven["world_size"] == 2, "epochs_done"] = 2
    assert learned(results_from(uneven), "GPUs") == []
    mixed = study("val_loss", {"ddp": {1: [1.5], 2: [1.6]}}).runs
    mixed.loc[mixed["world_size"] == 2, "model"] = "mlp"
    assert learned(results_from(mixed), "GPUs") == []


def test_of_many_series_some_have_a_sentence() -> None:
    many = {f"s{i}": {1: [1.5], 2: [1.6]} for i in range(7)}
    lines = learned(study("val_loss", many), "GPUs")
    assert len(lines) == 6
    assert lines[-1] == "Validation of the other 2 series: see the figures."


def test_equal_sizes_are_seldom_told_apart() -> None:
    """20 studies of two series whose loss and accuracy do not depend on the size."""
    draw = np.random.default_rng(15)
    false = 0
    for _ in range(20):
        loss, right = (
            {k: {n: draw.normal(1.5 / of, 0.05 / of, 3) for n in (1, 4)} for k in ("ddp", "fsdp")}
            for of in (1, 3)
        )
        lines = learned(study("val_loss", loss, right), "GPUs")
        false += any("more than the repeats vary" in line for line in lines)
    assert false <= 4  # 1 expected at most


def test_which_series_needs_the_least_memory_and_how_much_more_the_others_do() -> None:
    peaks = {
        "ddp": {1: [900.0] * 3, 4: [800.0, 801.0, 799.0]},
        "fsdp": {1: [950.0] * 3, 4: [400.0, 401.0, 399.0]},
        "single": {1: [100.0] * 3},
    }
    (line,) = memory_needed(study("peak_memory_mib", peaks), "GPUs")
    assert line.startswith("Peak memory per GPU on 4 GPUs (strong scaling): fsdp has the least,")
    ends = re.search(r"least, 400 MiB; ddp 2 times that \[95%: ([\d.]+) to ([\d.]+)\]\.$", line)
    assert ends and float(ends[1]) < 2 < float(ends[2])
    assert line in verdict(study("peak_memory_mib", peaks), "GPUs")


@pytest.mark.parametrize(
    ("ddp", "end"),
    [
        ([860.0, 800.0], "], may be chance."),
        ([800.0, 800.2], "fsdp has 800 MiB; ddp the same."),
        ([880.0], "ddp 1.1 times that (may be chance: not repeated)."),
    ],
)
def test_a_difference_of_memory_that_is_not_certain_is_not_claimed(
    ddp: list[float], end: str
) -> None:
    peaks = {"ddp": {2: ddp}, "fsdp": {2: [800.0, 800.0]}}
    (line,) = memory_needed(study("peak_memory_mib", peaks), "processes (ranks)")
    assert line.startswith("Peak memory per process on 2 processes (strong scaling): ")
    assert end in line


def test_memory_of_unlike_runs_is_not_compared() -> None:
    assert memory_needed(study("peak_memory_mib", {"ddp": {1: [9.0], 2: [9.0]}}), "GPUs") == []
    apart = {"ddp": {2: [800.0]}, "fsdp": {4: [400.0]}}
    assert memory_needed(study("peak_memory_mib", apart), "GPUs") == []
    both = {"ddp": {2: [800.0]}, "fsdp": {2: [400.0]}}
    runs = study("peak_memory_mib", both).runs
    runs.loc[runs["series"] == "fsdp", "device_type"] = "cpu"
    assert memory_needed(results_from(runs), "GPUs") == []
    dp = {"dp": {1: [800.0]}, "single": {1: [400.0]}}
    runs = study("peak_memory_mib", dp).runs
    runs.loc[runs["series"] == "dp", "devices"] = 4
    assert memory_needed(results_from(runs), "GPUs") == []


def test_of_many_series_the_least_and_the_most_memory_are_named() -> None:
    many = {f"s{i}": {2: [100.0 + 10 * i]} for i in range(8)}
    (line,) = memory_needed(study("peak_memory_mib", many), "GPUs")
    assert "s0 has the least, 100 MiB; s7 1.7 times that (may be chance: not repeated)" in line
    assert line.endswith(" (6 more series between).")
