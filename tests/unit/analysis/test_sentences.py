"""Sentences that were false or odd in the reports of real studies."""

import io

import pytest
from rich.console import Console

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.forecast import forecasts
from jobkit.analysis.findings.stragglers import uneven_steps
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.laws import laws_table
from jobkit.analysis.report.proposal import proposal_table
from jobkit.analysis.report.summary import print_summary
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from jobkit.analysis.tables.text import TextTable
from support.measured_study import results_from, results_of, runs_of

SLOWER = {1: [1641.0], 2: [1244.0], 4: [1145.0]}


def said(rates: dict[int, list[float]]) -> list[str]:
    return verdict(results_of({"ddp": rates}), "GPUs")


def laws(rates: dict[int, list[float]], scaling: str = "strong") -> TextTable:
    return laws_table(forecasts(results_of({"ddp": rates}, scaling)))


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_a_series_that_gets_slower_has_no_serial_fraction(scaling: str) -> None:
    table = laws(SLOWER, scaling)
    assert [row[2:5] for row in table.rows] == [["serial fraction", "-", "-"]]
    (note,) = [n for n in table.notes if "no serial fraction" in n]
    assert note.startswith("ddp: no serial fraction: as fitted, it gets slower with more ranks")


def test_a_serial_fraction_up_to_1_is_shown_and_what_it_does_not_say_is_noted() -> None:
    table = laws({n: [100 * n / (1 + 0.1 * (n - 1))] for n in (1, 2, 4)})
    assert table.rows[0][3] == "0.1000"
    assert not [n for n in table.notes if "no serial fraction" in n]
    flat = laws({1: [100.0], 2: [100.0], 4: [100.0]})
    assert flat.rows[0][3] == "1.0000"  # all of the work is serial
    ideal = laws({1: [100.0], 2: [200.0], 4: [400.0]})
    assert ideal.rows[0][3] == "0.0000"  # it was -0.0000
    odd = laws({1: [312.5], 2: [636.0], 4: [727.8]}, "weak")
    assert any("the serial fraction may be anything from 0 to 1" in n for n in odd.notes)
    assert any("Gustafson misses a measured size by 30%" in n for n in odd.notes)


def test_the_verdict_says_that_a_series_gets_no_faster() -> None:
    (line,) = [line for line in said(SLOWER) if "no larger size" in line]
    assert line.startswith("ddp: no larger size was faster than 1 GPU: ")
    assert "the highest speed-up is 0.758, on 2 GPUs." in line
    assert not [line for line in said({1: [100.0], 2: [110.0]}) if "no larger size" in line]


def test_the_efficiency_that_is_quoted_is_of_the_size_that_is_named() -> None:
    once = said({1: [100.0], 2: [190.0], 4: [340.0]})
    assert any("largest measured size, 4 GPUs: 85.0% (uncertain" in line for line in once)
    dip = said({1: [100.0], 2: [164.0], 4: [340.0]})
    assert any("size, 4 GPUs: 85.0% there, lowest on 2 GPUs: 82.0% (unc" in line for line in dip)


def test_far_above_ideal_the_highest_of_each_series_is_named_in_one_sentence() -> None:
    above = {"a": {1: [15.9], 2: [203.9], 4: [139.7]}, "b": {1: [17.7], 2: [136.2], 4: [106.2]}}
    results = results_of(above, "weak")
    (line,) = [line for line in verdict(results, "GPUs") if "of ideal scaling" in line]
    assert line.startswith("a is measured at 641% of ideal scaling on 2 GPUs, the most of 2 sizes")
    assert "; b is measured at 385% of ideal scaling on 2 GPUs" in line
    assert "slow runs on 1 GPU, the baseline" in line
    assert line.endswith("More than 150% points to the baseline: repeat 1 GPU first.")
    page = summary(results)
    assert "a is measured at 641% of ideal scaling on 2 ranks" in page
    assert "of ideal scaling" not in summary(results_of({"ddp": {1: [100.0], 2: [209.0]}}))


def test_all_series_above_ideal_are_remarked_however_many() -> None:
    many = {f"s{i}": {1: [100.0], 2: [230.0 - i]} for i in range(7)}
    (line,) = [x for x in verdict(results_of(many), "GPUs") if "of ideal scaling" in x]
    assert line.count("is measured at") == 5
    assert "; 2 more series are above 105%." in line


def summary(results: Results) -> str:
    page = io.StringIO()
    print_summary(results, Console(file=page, width=200, highlight=False))
    return page.getvalue()


def test_outliers_are_named_in_the_summary_too() -> None:
    rates = {1: [100.0, 101, 99], 2: [190.0, 191, 120]}
    assert "size: ddp-2-2 (-37%)." in summary(results_of({"ddp": rates}))


def with_failures() -> Results:
    """The wall times of a program of which two of three sizes failed."""
    rows = runs_of({"train": {1: [1671.0], 2: [1.0], 4: [1.0]}})
    for row in rows:
        row |= {"images_per_s": None, "time_per_epoch_s": None, "train_samples": None}
        ok = row["world_size"] == 1
        rate = {"throughput": 1671.0, "throughput_unit": "runs/h"} if ok else {}
        row |= {"status": "ok" if ok else "failed"} | rate
    return results_from(frame(rows, RESULTS))


def test_a_study_with_failed_runs_names_its_time_as_one_without() -> None:
    results = with_failures()
    assert list(results.scaling["time_of"].unique()) == ["run"]
    assert list(results.scaling["throughput_unit"].unique()) == ["runs/h"]
    assert "time per run (s)" in proposal_table(results.scaling, "GPUs").heads
    assert " or epoch" not in summary(results)
    assert verdict(results, "GPUs")[-1] == "1 of 3 planned runs is ok; 2 failed."


def test_nothing_is_said_of_repeats_where_nothing_was_measured() -> None:
    rows = runs_of({"ddp": {1: [100.0], 2: [190.0]}})
    measured = results_from(frame(rows, RESULTS))
    failed = results_from(frame([row | {"status": "failed"} for row in rows], RESULTS))
    for results, said_so in ((measured, True), (failed, False)):
        notes = proposal_table(results.scaling, "GPUs").notes
        assert ("two successful repeats, so" in summary(results)) is said_so
        assert any("two successful repeats, so" in note for note in notes) is said_so


def test_repeats_of_a_series_that_is_not_compared_have_no_cost() -> None:
    rows = runs_of({"ddp": {1: [100.0], 2: [190.0]}}, seconds=60.0)
    rows[1]["device_type"] = "cpu"
    lines = verdict(results_from(frame(rows, RESULTS)), "GPUs")
    assert any("2 more repeats of every size of ddp give intervals." in line for line in lines)


def test_one_size_is_said_once() -> None:
    lines = said({1: [100.0]})
    assert sum("scaling is unknown" in line or " only." in line for line in lines) == 1


def test_a_series_that_is_not_compared_was_not_measured_at_one_size() -> None:
    rows = runs_of({"ddp": {1: [100.0], 2: [190.0]}})
    rows[1]["device_type"] = "cpu"
    lines = verdict(results_from(frame(rows, RESULTS)), "GPUs")
    assert any(line.startswith("ddp: not compared: device_type differs") for line in lines)
    assert not [line for line in lines if "one size" in line]


@pytest.mark.parametrize(
    ("source", "words"),
    [("meter", "of a window's steps"), ("pattern mine", "of a run's steps")],
)
def test_the_sentence_on_steps_says_of_what_its_percentile_is(source: str, words: str) -> None:
    rows = runs_of({"ddp": {1: [100.0]}})
    rows[0] |= {"step_p50_s": 0.1, "step_p99_s": 0.3, "steps_timed": 400}
    rows[0] |= {"throughput_source": source}
    (line,) = uneven_steps(results_from(frame(rows, RESULTS)), "GPUs")
    assert f"the 99th percentile {words} (of fewer than 100 steps: the longest)" in line
    assert ("median over the windows" in line) is (source == "meter")
