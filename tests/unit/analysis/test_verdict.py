"""The sentences of the verdict, against the truth of made-up studies."""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from jobkit.analysis.collect.results import Results
from jobkit.analysis.collect.rows import OF_EPOCHS, WALL_TIME
from jobkit.analysis.figures.by_size import ends_of, lines_of, size_figure
from jobkit.analysis.figures.style import subtitle
from jobkit.analysis.findings.forecast import forecasts
from jobkit.analysis.findings.learned import learned, memory_needed
from jobkit.analysis.findings.threads import thread_lines
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.report.laws import laws_table
from jobkit.analysis.report.many_runs import MOST_LISTED, MOST_OF_A_KIND, listed
from jobkit.analysis.report.proposal import proposal_table
from jobkit.analysis.report.summary import print_summary
from jobkit.analysis.scaling.sizes import SEVERAL_STARTS
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from jobkit.analysis.tables.text import TextTable
from support.measured_study import results_from, results_of, runs_of

SIZES = (1, 2, 4, 8)
GPUS = r"(\d+) GPUs?"


def said(rates: dict[int, list[float]], least: float = 0.8, **others) -> list[str]:
    return verdict(results_of({"ddp": rates}, **others), "GPUs", least)


def test_a_size_of_which_the_interval_crosses_the_threshold_is_doubted_on_both_sides() -> None:
    """ "stays at or above 80 % ... 90.4 % [52.3, 99.1]" had no doubt, where "falls below" had."""
    noisy = {1: [100.0, 90, 110], 2: [180.0, 160, 200]}
    assert any("ddp seems to have at least 80%" in line for line in said(noisy))
    assert any("(uncertain: the interval includes 80%)" in line for line in said(noisy))
    assert "Undecided at 80% parallel efficiency: repeat ddp on 1 and 2 GPUs." in said(noisy)
    calm = {1: [100.0, 101, 99], 2: [180.0, 181, 179]}
    assert not [line for line in said(calm) if "repeat" in line]
    (limit,) = [line for line in said(calm) if "at least 80%" in line]
    assert limit.startswith("ddp has at least")
    assert "uncertain" not in limit


def test_the_base_is_named_where_it_is_not_one_rank() -> None:
    lines = said({2: [100.0, 101, 99], 4: [183.0, 182, 184]})
    assert "speed-up 1.83 [95%: " in lines[1]
    assert "] over 2 GPUs, parallel efficiency 92% [95%: " in lines[1]
    assert any(re.search(r"4 GPUs: 91\.5% \[[^]]*\] relative to 2 GPUs\.", x) for x in lines)


def test_a_size_beyond_a_dip_is_requested_where_it_is_certain() -> None:
    calm = {1: [100.0, 100.2], 2: [154.0, 154.2], 4: [340.0, 340.5], 8: [688.0, 689.0]}
    assert any("falls below 80% parallel efficiency at 2 GPUs: 77.0%" in x for x in said(calm))
    assert said(calm)[1].startswith("Request 8 GPUs with ddp: speed-up 6.88 [95%: ")
    noisy = {n: [0.8 * x[0], x[0], 1.2 * x[0]] for n, x in calm.items()}
    assert said(noisy)[1].startswith("Request 1 GPU with ddp: the next size measured, 2 GPUs, may ")


def test_requested_is_an_efficient_size_of_a_series_that_is_not_the_fastest() -> None:
    """It was the largest efficient size of the fastest series, however slow that size."""
    rates = {
        "ddp": {1: [1000.0, 1001], 4: [3400.0, 3401], 16: [5700.0, 5702]},
        "fsdp": {1: [700.0, 701], 4: [2700.0, 2701], 8: [5200.0, 5203]},
    }
    lines = verdict(results_of(rates), "GPUs")
    assert lines[0].startswith("Strong scaling: the fastest is ddp on 16 GPUs")
    assert lines[1].startswith("Request 8 GPUs with fsdp: speed-up 7.43")


@pytest.mark.parametrize(
    ("rates", "asked"),
    [
        ({"single": {1: 500}, "ddp": {2: 190, 4: 200}}, None),
        ({"ddp": {1: 100, 2: 150}, "fsdp": {1: 70, 2: 140}}, "Request 1 GPU with ddp"),
        ({"ddp": {1: 100, 2: 150}, "fsdp": {2: 60, 4: 118}}, "Request 1 GPU with ddp"),
    ],
)
@pytest.mark.parametrize("repeats", [1, 3])
def test_nothing_slower_than_another_series_on_as_many_gpus_is_requested(
    rates: dict[str, dict[int, float]], asked: str | None, repeats: int
) -> None:
    """The efficiency of a series with a slow baseline is high."""
    noise = [1, 1.001, 0.999][:repeats]
    rows_of = {s: {n: [x * f for f in noise] for n, x in own.items()} for s, own in rates.items()}
    found = [x for x in verdict(results_of(rows_of), "GPUs") if x.startswith("Request")]
    assert [x.partition(":")[0] for x in found] == ([asked] if asked else [])


def test_a_series_that_is_not_compared_keeps_no_other_from_being_requested() -> None:
    rows = runs_of({"a": {1: [1000.0, 1001], 2: [1900.0, 1901]}})
    rows[-1] |= {"precision": "bf16"}
    rows += runs_of({"b": {1: [900.0, 901], 2: [1700.0, 1701]}})
    lines = verdict(results_from(frame(rows, RESULTS)), "GPUs")
    start = "Strong scaling: the fastest of the series that can be compared is b on 2 GPUs"
    assert lines[0].startswith(start)
    assert lines[1].startswith("Request 2 GPUs with b: speed-up 1.89")
    assert "a: not compared: precision differs (bf16, fp32)." in lines


def test_what_may_be_as_fast_is_named_with_its_size_where_that_is_another() -> None:
    rates = {
        "ddp": {1: [1000.0, 990], 4: [3400.0, 3440], 8: [3420.0, 3470]},
        "fsdp": {1: [700.0, 701], 8: [3410.0, 3390], 16: [3430.0, 3450]},
    }
    (line,) = [x for x in verdict(results_of(rates), "GPUs") if "the fastest is" in x]
    start = "Strong scaling: the fastest is ddp on 8 GPUs, with 3,445 images per second; not told "
    assert line == f"{start}apart from ddp on 4 GPUs; fsdp; fsdp on 16 GPUs at 95% confidence."
    once = {s: {n: x[:1] for n, x in sizes.items()} for s, sizes in rates.items()}
    assert "told apart" not in verdict(results_of(once), "GPUs")[0]


def on_nodes(sizes: dict[tuple[int, int], list[float]]) -> Results:
    """A series by ranks and nodes."""
    rows = []
    for (ranks, nodes), rates in sizes.items():
        place = {"nodes": nodes, "ranks_per_node": ranks // nodes}
        own = runs_of({"ddp": {ranks: rates}})
        rows += [row | place | {"run_id": f"{row['run_id']}-{nodes}"} for row in own]
    return results_from(frame(rows, RESULTS))


def test_as_many_ranks_on_more_nodes_are_no_larger_size() -> None:
    """ "Request 8 GPUs on 2 nodes: speed-up 0.86 over 8 GPUs" was said."""
    both = on_nodes({(8, 1): [8000.0, 8010], (8, 2): [6900.0, 6910]})
    lines = verdict(both, "GPUs")
    assert "ddp was measured at one number of ranks only: its scaling is unknown." in lines
    assert not [x for x in lines if x.startswith("Request")]
    more = {(1, 1): [1000.0, 1001], (4, 1): [3700.0, 3701], (4, 2): [3300.0, 3301]}
    assert verdict(on_nodes(more), "GPUs")[1].startswith("Request 4 GPUs with ddp: speed-up 3.70")


def test_outliers_are_named_in_the_first_lines() -> None:
    """Two of three runs on 1 GPU are disturbed, so that the sound one is far from the median."""
    calm = {n: [1000 * n * 0.95 * x for x in (0.99, 1, 1.01)] for n in (2, 4, 8)}
    lines = said({1: [1000.0, 600, 610], **calm})
    assert lines[1].startswith("1 run is an outlier, by the distance from the median of the size: ")
    assert "size: ddp-1-0 (+64%)." in lines[1]
    assert lines[1].endswith("were disturbed: repeat that size, the baseline of ddp first.")
    slow = said({1: [1000.0, 990, 1010], **calm, 16: [14900.0, 15000, 9000]})
    assert "size: ddp-16-2 (-40%). Medians keep such runs, forecasts leave them out." in slow[1]
    assert "baseline" not in slow[1]
    assert not [x for x in said(calm) if "outlier" in x]


def test_a_run_that_shared_its_node_with_a_failed_one_is_named() -> None:
    rows = runs_of({"ddp": {1: [100.0, 101], 2: [190.0, 191]}})
    for i, row in enumerate(rows):
        row |= {"job_id": str(i), "node_list": "a" if i < 2 else f"n{i}"}
        row |= {"start_time_s": 10.0 * i, "end_time_s": 100.0}
    rows[1] |= {"status": "failed", "images_per_s": None}
    (line,) = [x for x in verdict(results_from(frame(rows, RESULTS)), "GPUs") if "shared" in x]
    assert line.startswith("1 run shared a node with another at the same time, so its rate ")
    assert "(on a): ddp-1-0." in line


def test_slurm_jobs_that_shared_a_node_are_named_in_the_first_lines() -> None:
    results = results_of({"ddp": {1: [100.0, 101, 99], 2: [190.0, 191, 189]}})
    runs = results.runs
    runs["job_id"] = pd.Series([str(i) for i in range(6)], dtype="string")
    runs["node_list"] = pd.Series(["a,b", "b,c", "d", "e", "f", "a"], dtype="string")
    runs["start_time_s"] = pd.Series([0, 50, 50, 50, 50, 100], dtype="Float64")
    runs["end_time_s"] = runs["start_time_s"] + 100
    (line,) = [line for line in verdict(results, "GPUs")[:2] if "shared a node" in line]
    assert line.startswith("2 runs shared a node")  # ddp-2-2 began on a when ddp-1-0 ended
    assert "(on b): ddp-1-0, ddp-1-1. Use --exclusive." in line
    runs["job_id"] = pd.Series(["7"] * 6, dtype="string")  # in one allocation
    (line,) = [line for line in verdict(results, "GPUs")[:2] if "shared a node" in line]
    assert line.endswith("Use --max-running 1.")
    runs["job_id"] = pd.Series([None] * 6, dtype="string")  # not of Slurm
    assert not [line for line in verdict(results, "GPUs") if "shared a node" in line]


Truth = dict[str, dict[int, float]]


def study_of(seed: int) -> tuple[dict[str, dict[int, list[float]]], Truth]:
    """The rates of a rows_of of two series by Amdahl's law, and their true rates."""
    g = np.random.default_rng([9, seed])
    truth = {
        name: {n: float(x * n / (1 + 10 ** g.uniform(-2.5, -0.8) * (n - 1))) for n in SIZES}
        for name, x in (("ddp", 1000.0), ("fsdp", 1000.0 * g.uniform(0.85, 1)))
    }
    repeats, sd = int(g.choice([1, 2, 3, 5])), g.uniform(0.01, 0.05)
    drawn = {
        name: {n: list(x * np.exp(sd * g.standard_normal(repeats))) for n, x in sizes.items()}
        for name, sizes in truth.items()
    }
    return drawn, truth


def studies(count: int) -> Iterator[tuple[Results, Truth]]:
    """Studies and their true rates; a table of all their runs at once costs least."""
    made = [study_of(seed) for seed in range(count)]
    rows = [
        row | {"study": str(seed)} for seed, (drawn, _) in enumerate(made) for row in runs_of(drawn)
    ]
    runs = frame(rows, RESULTS)
    for seed, own in runs.groupby("study", sort=False):
        yield results_from(own), made[int(seed)][1]


def is_true(line: str, truth: Truth) -> bool | None:
    """Whether a sentence that claims without doubt is true; None where it claims nothing so."""
    if "uncertain" in line or "seems to" in line or "may already" in line:
        return None
    share = lambda name, n: truth[name][n] / truth[name][1] / n  # noqa: E731
    if found := re.match(rf"(\w+) falls below 80% parallel efficiency at {GPUS}", line):
        return share(found[1], int(found[2])) < 0.8
    if found := re.match(rf"(\w+) has at least 80% .* measured size, {GPUS}", line):
        return all(share(found[1], n) >= 0.8 for n in SIZES if n <= int(found[2]))
    if found := re.match(rf"Request {GPUS} with (\w+): the next .*, is already", line):
        return share(found[2], 2 * int(found[1])) < 0.8
    if found := re.match(rf"Request {GPUS} with (\w+): speed-up", line):
        return share(found[2], int(found[1])) >= 0.8  # beyond a dip, too
    if found := re.match(rf".*the fastest is (\w+) on {GPUS}, with .* second(.*)", line):
        if not found[3].startswith("."):
            return None  # not told apart from others
        best = max((x, name) for name, sizes in truth.items() for x in sizes.values())
        return truth[found[1]][int(found[2])] == best[0]
    return None


def test_of_the_sentences_of_100_studies_2_in_100_are_false_at_most() -> None:
    judged = []
    for results, truth in studies(100):
        lines = verdict(results, "GPUs")
        if pd.isna(results.scaling["spread_from"]).all():
            assert any(
                "two successful repeats, so differences may be noise" in line for line in lines
            )
            continue  # said of all its differences
        judged += [(found, line) for line in lines if (found := is_true(line, truth)) is not None]
    false = [line for found, line in judged if not found]
    assert len(judged) > 50
    assert len(false) <= 0.02 * len(judged), false


SLOWER = {1: [1641.0], 2: [1244.0], 4: [1145.0]}


def laws(rates: dict[int, list[float]], scaling: str = "strong") -> TextTable:
    return laws_table(forecasts(results_of({"ddp": rates}, scaling)))


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_a_series_that_gets_slower_has_no_serial_fraction(scaling: str) -> None:
    table = laws(SLOWER, scaling)
    assert [row[2:5] for row in table.rows] == [["serial fraction", "-", "-"]]
    (note,) = [n for n in table.notes if "no serial fraction" in n]
    assert note.startswith("ddp: no serial fraction: as fitted, it gets slower with more ranks")


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


def summary(results: Results) -> str:
    page = io.StringIO()
    print_summary(results, Console(file=page, width=200, highlight=False))
    return page.getvalue()


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


# By ranks and nodes.
SEVERAL = {
    (4, 1): [400.0, 401, 399],
    (4, 2): [350.0, 351, 349],
    (4, 4): [280.0, 281, 279],
    (8, 1): [790.0, 791, 789],
    (8, 2): [700.0, 701, 699],
    (16, 1): [1584.0, 1585, 1583],
}


def test_the_request_follows_the_sizes_on_the_fewest_nodes() -> None:
    """It was "Request 4 GPUs on 2 nodes: speed-up 0.88", as 4 on 4 nodes are below 80 %."""
    lines = verdict(on_nodes(SEVERAL), "GPUs")
    assert any(line.startswith("Request 16 GPUs with ddp: speed-up 3.96 ") for line in lines)
    assert not [line for line in lines if "falls below" in line]


def test_a_forecast_says_which_of_several_placements_it_is_made_from() -> None:
    (one,) = forecasts(on_nodes(SEVERAL), (32,))
    assert one.caution.startswith("the forecast of ddp uses its sizes on one node only, so what ")
    alone = {k: v for k, v in SEVERAL.items() if k[1] == 1}
    (one,) = forecasts(on_nodes(alone), (32,))
    assert one.caution.startswith("every measured size of ddp is on one node, ")


@pytest.fixture
def with_dp() -> Results:
    """The one process of dp computes on 4 GPUs."""
    series = {"ddp": {1: [100.0, 101, 99], 2: [190.0, 191, 189]}, "dp": {1: [380.0, 381, 379]}}
    runs = frame(runs_of(series), RESULTS)
    runs["devices"] = runs["world_size"].where(runs["series"] != "dp", 4)
    runs["strategy"] = runs["series"]
    return results_from(runs)


def test_each_line_beyond_the_fewest_nodes_has_one_number_of_nodes() -> None:
    many = on_nodes({(4, 1): [4.0], (4, 2): [3.0], (8, 2): [8.0], (8, 4): [7.0], (4, 4): [2.0]})
    drawn = [[(s.nodes, s.ranks_per_node) for s in line] for line in lines_of(many.sizes)]
    assert drawn == [[(1, 4), (2, 4)], [(2, 2)], [(4, 1), (4, 2)]]


def test_dp_counts_as_the_gpus_that_it_computes_on(with_dp: Results) -> None:
    assert verdict(with_dp, "GPUs")[0].startswith("Strong scaling: the fastest is dp on 4 GPUs, ")
    table = proposal_table(with_dp.scaling, "GPUs")
    gpus = table.heads.index("GPUs")
    assert {(row[0], row[gpus]) for row in table.rows} == {("ddp", "1"), ("ddp", "2"), ("dp", "4")}
    (dp,) = [size for size in with_dp.sizes if size.series == "dp"]
    low, high = ends_of(dp, "throughput_per_rank") or (0, 0)
    assert low < 95 < high and dp.throughput_per_rank == 95
    figure = size_figure(with_dp, "throughput")
    assert figure is not None
    for axes, rate in zip(figure.axes, (380, 95), strict=True):
        assert [4, rate] in [[*map(float, line.get_xydata()[0])] for line in axes.lines]
    plt.close(figure)


Values = dict[str, dict[int, Sequence[float]]]  # by series and ranks: of each repeat


def learnt(name: str, values: Values, more: Values | None = None, **fixed: Any) -> Results:
    """A learnt whose runs have these values in a column; more: accuracies."""
    rates = {k: {n: [100.0 * n] * len(x) for n, x in of.items()} for k, of in values.items()}
    rows = runs_of(rates)
    for row in rows:
        place = row["series"], row["world_size"], row["repeat"]
        row |= {"epochs_done": 3, "devices": row["world_size"]} | fixed
        row[name] = values[place[0]][place[1]][place[2]]
        if more:
            row["val_accuracy"] = more[place[0]][place[1]][place[2]]
    return results_from(frame(rows, RESULTS))


def test_loss_and_accuracy_differ_where_the_ranges_of_the_repeats_do() -> None:
    loss = {"ddp": {1: [1.50, 1.51, 1.49], 2: [9.0, 9.0, 9.0], 4: [1.80, 1.81, 1.79]}}
    right = {"ddp": {1: [0.50, 0.52, 0.48], 2: [0.1, 0.1, 0.1], 4: [0.49, 0.51, 0.50]}}
    results = learnt("val_loss", loss, right)
    assert learned(results, "GPUs") == [
        "ddp: the validation loss rises from 1.5 on 1 GPU to 1.8 on 4 GPUs.",
        "The accuracy does not change with the size beyond the repeats: 50.0%.",
    ]
    assert {*learned(results, "GPUs")} <= {*verdict(results, "GPUs")}
    (line,) = learned(learnt("val_accuracy", {"ddp": {1: [0.9], 2: [0.8]}}), "GPUs")
    assert line.endswith("falls from 90.0% on 1 GPU to 80.0% on 2 GPUs: may be chance, repeat it.")
    runs = learnt("val_loss", {"ddp": {1: [1.5, 1.6], 2: [1.7, 1.8]}}).runs
    runs.loc[runs["world_size"] == 2, "global_batch_size"] = 1024
    (line,) = learned(results_from(runs.assign(scaling="weak")), "GPUs")
    assert line.endswith(" (global batches of 512 and 1024).")


def test_an_accuracy_above_1_is_no_share() -> None:
    percent = learnt("val_accuracy", {"ddp": {1: [93.1, 93.2], 2: [92.1, 92.0]}})
    (warning,) = [line for line in percent.warnings() if "val_accuracy" in line]
    assert "val_accuracy is above 1 in 4 runs, as ddp-1-0: it is a share" in warning
    assert learnt("val_accuracy", {"ddp": {1: [1.0], 2: [0.9]}}).warnings() == []


@pytest.mark.parametrize(
    ("column", "value"), [("epochs_done", 2), ("model", "mlp"), ("status", "failed")]
)
def test_losses_of_unlike_runs_are_not_compared(column: str, value: object) -> None:
    runs = learnt("val_loss", {"ddp": {1: [1.5], 2: [1.6]}}).runs
    assert len(learned(results_from(runs), "GPUs")) == 1
    runs.loc[runs["world_size"] == 2, column] = value
    assert learned(results_from(runs), "GPUs") == []


def test_which_series_needs_the_least_memory() -> None:
    peaks = {
        "ddp": {1: [900.0] * 3, 4: [800.0, 801.0, 799.0]},
        "fsdp": {1: [950.0] * 3, 4: [400.0, 401.0, 399.0]},
        "single": {1: [100.0] * 3},
    }
    results = learnt("peak_memory_mib", peaks)
    line = "Least memory per GPU on 4 GPUs: fsdp 400 MiB, ddp 800 MiB."
    assert memory_needed(results, "GPUs") == [line] and line in verdict(results, "GPUs")
    runs = results.runs
    runs.loc[runs["series"] != "ddp", "device_type"] = "cpu"
    assert memory_needed(results_from(runs), "GPUs") == []
    for unlike in (
        {"ddp": {1: [9.0], 2: [9.0]}},  # one series
        {"ddp": {2: [800.0]}, "fsdp": {4: [400.0]}},  # no common size
        {"ddp": {2: [700.0, 900.0]}, "fsdp": {2: [800.0, 810.0]}},  # may be chance
    ):
        assert memory_needed(learnt("peak_memory_mib", unlike), "GPUs") == []
    runs = learnt("peak_memory_mib", {"dp": {1: [800.0]}, "single": {1: [400.0]}}).runs
    runs.loc[runs["series"] == "dp", "devices"] = 4
    assert memory_needed(results_from(runs), "GPUs") == []


def threads_of(rates: dict[int, tuple[float, ...]], threads: dict[int, int], **cells) -> list[str]:
    results = results_of({"ddp": rates})
    used = results.runs["world_size"].map(threads)
    cells = {"device_type": "cpu", "threads_used": used} | cells
    return thread_lines(replace(results, runs=results.runs.assign(**cells)))


def test_the_fastest_way_comes_first_and_is_named_where_every_repeat_agrees() -> None:
    found = threads_of({1: (1000, 1010, 990), 4: (1500, 1490, 1510)}, {1: 4, 4: 1})
    assert found == [
        "4 cores as threads or processes, the fastest first:",
        "  4 processes x 1 thread (ddp): 1,500 images/s",
        "  1 process x 4 threads (ddp): 1,000 images/s",
        "4 processes x 1 thread (ddp) is faster than every other way in each repeat",
    ]


def test_repeats_that_overlap_or_are_missing_decide_nothing() -> None:
    assert "none is faster" in threads_of({1: (1000, 1300), 4: (1200, 1400)}, {1: 4, 4: 1})[-1]
    assert "one repeat alone" in threads_of({1: (1000,), 4: (1200,)}, {1: 4, 4: 1})[-1]


@pytest.mark.parametrize(
    ("threads", "cells"),
    [
        ({1: 1, 4: 1}, {}),  # more cores for more processes: scaling, and no division
        ({1: 4, 4: 1}, {"device_type": "cuda"}),
        ({1: 4, 4: 1}, {"nodes": 2}),
        ({1: 4, 4: 1}, {"status": "failed"}),
        ({1: 4, 4: None}, {}),
    ],
)
def test_other_studies_have_no_such_table(threads, cells) -> None:
    assert threads_of({1: (1000, 1010), 4: (1500, 1490)}, threads, **cells) == []


def test_a_size_that_leaves_a_core_idle_is_left_out() -> None:
    found = threads_of({1: (1000, 1001), 2: (1200, 1201), 4: (900, 901)}, {1: 6, 2: 3, 4: 1})
    assert found[0].startswith("6 cores") and len(found) == 4


def many(runs: list[dict[str, Any]], outliers: str | None = None) -> Any:
    sizes = {"series": "ddp", "nodes": 1, "throughput_unit": "images/s", "status": "ok"}
    rows = [{**sizes, "world_size": 1, "throughput": 100.0, **run} for run in runs]
    return SimpleNamespace(
        runs=pd.DataFrame(rows), scaling=pd.DataFrame({"outliers": [outliers, None]})
    )


def test_of_many_those_to_look_at_are_listed_in_order() -> None:
    runs: list[dict[str, Any]] = [{"run_id": f"r{i}"} for i in range(MOST_LISTED + 100)]
    for i in range(100, 200):  # twice as large: as fast as their size
        runs[i] |= {"world_size": 2, "throughput": 200.0}
    runs[150] |= {"throughput": 150.0}  # slow for its size, though faster than those of one rank
    runs[20] |= {"throughput": 120.0}
    runs[30] |= {"status": "failed", "throughput": None}
    for i in range(210, 300):
        runs[i] |= {"status": "timeout", "throughput": None}
    found = [str(name) for name in listed(many(runs, "r40, r41"))["run_id"]]
    assert {"r150", "r20", "r30", "r40", "r41"} <= {*found}
    assert len(found) <= 4 * MOST_OF_A_KIND
    assert found == sorted(found, key=lambda name: int(name[1:]))
    assert sum(int(name[1:]) >= 210 for name in found) == MOST_OF_A_KIND - 1


INFERRED = "count samples inferred from the batches of the loaders"


def sourced_study(*sources: tuple[str, str | None]):
    """A sourced_study of one series; each size has another source of its rate, and of its work."""
    rows = runs_of({"train": {n: [100.0 * n] for n in range(1, len(sources) + 1)}})
    for row, (source, work) in zip(rows, sources, strict=True):
        row |= {"throughput": row["images_per_s"], "throughput_unit": "samples/s", "model": None}
        row |= {"throughput_source": source, "work_source": work}
    return results_from(frame(rows, RESULTS))


@pytest.mark.parametrize(
    ("sources", "under"),
    [
        ([("auto", "inferred")],
         "measured by the start-up hook, samples inferred from the batches"),
        ([("auto", "stated")], "measured by the start-up hook"),
        ([("lightning", "counted")], "measured by the adapter for Lightning"),
        ([("metric lines", None)], "read from [METRIC] lines"),
        ([("pattern mine", None)], "read by pattern mine"),
        ([(WALL_TIME, None)], WALL_TIME),
        ([(OF_EPOCHS, None)], "measured over epochs of the training"),
        ([("meter", "counted"), ("auto", "stated")],
         "measured by the start-up hook and measured by the meter"),
    ],
)  # fmt: skip
def test_the_figures_say_what_measured(sources, under: str) -> None:
    text = " ".join(subtitle(sourced_study(*sources)).split())
    assert text.startswith(f"{under} strong scaling")


def test_the_report_says_that_samples_are_inferred_and_of_which_runs() -> None:
    def said(*sources: tuple[str, str | None]) -> list[str]:
        return [line for line in verdict(sourced_study(*sources), "GPUs") if INFERRED in line]

    assert said(("auto", "stated"), ("meter", "counted")) == []
    (line,) = said(("auto", "inferred"), ("auto", "inferred"))
    assert line.startswith(f"The rates {INFERRED}") and "--work-per-step" in line
    (line,) = said(("auto", "inferred"), ("auto", "stated"))
    assert line.startswith("The rates of 1 of 2 runs ")


def test_a_run_that_was_started_again_says_why_its_wall_time_is_no_rate() -> None:
    rows = runs_of({"train": {1: [100.0], 2: [200.0]}})
    for row, attempts in zip(rows, (1, 2), strict=True):
        row |= {"attempts": attempts, "throughput_unit": "runs/h", "throughput": 100.0}
        row |= {"throughput_source": WALL_TIME, "images_per_s": None, "train_samples": None}
    rows[1] |= {"throughput": None, "throughput_unit": None}
    results = results_from(frame(rows, RESULTS))
    first, second = results.sizes
    assert first.note is None and second.note == SEVERAL_STARTS
    assert results.scaling["note"].to_list()[1] == SEVERAL_STARTS
    assert f"{rows[1]['run_id']}: {SEVERAL_STARTS}" in results.warnings()
    assert not any(rows[0]["run_id"] in line for line in results.warnings())
