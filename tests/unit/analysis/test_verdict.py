"""The sentences of the verdict, against the truth of made-up studies."""

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.forecast import forecasts
from jobkit.analysis.findings.verdict import verdict
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
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
    calm = {1: [100.0, 101, 99], 2: [180.0, 181, 179]}
    (limit,) = [line for line in said(calm) if "at least 80%" in line]
    assert limit.startswith("ddp has at least")
    assert "uncertain" not in limit


def test_what_to_repeat_so_that_a_size_is_decided_and_what_it_costs() -> None:
    noisy = {1: [100.0, 95, 105], 2: [172.0, 164, 180]}
    (line,) = [line for line in said(noisy, seconds=360) if "repeats of ddp on 1 and 2" in line]
    count, hours = re.match(r"(\d+) more repeats .* \(([\d.]+) node-hours\)", line).groups()
    assert float(hours) == pytest.approx(int(count) * 2 * 0.1)
    more = {n: [*x, *[sorted(x)[1]] * int(count)] for n, x in noisy.items()}
    assert not [line for line in said(more) if "more repeats" in line]
    once = said({1: [100.0], 2: [190.0], 4: [360.0]}, seconds=360)
    assert any("2 more repeats of every size of ddp (0.6 node-hours)" in line for line in once)
    assert any("uncertain: without repeats there is no interval" in line for line in once)


def test_the_base_is_named_where_it_is_not_one_rank() -> None:
    lines = said({2: [100.0, 101, 99], 4: [183.0, 182, 184]})
    assert "speed-up 1.83 [95%: " in lines[1]
    assert "] over 2 GPUs, parallel efficiency 92% [95%: " in lines[1]
    assert any(re.search(r"4 GPUs: 91\.5% \[[^]]*\] relative to 2 GPUs\.", x) for x in lines)


def test_a_dip_and_a_recovery_are_both_said() -> None:
    calm = {1: [100.0, 100.2], 2: [154.0, 154.2], 4: [340.0, 340.5], 8: [688.0, 689.0]}
    (line,) = [line for line in said(calm) if "falls below" in line]
    assert "at 2 GPUs: 77.0%" in line
    assert line.endswith("At 4 GPUs and 8 GPUs it is measured at 80% or above again.")
    # Certain beyond the dip, it is what to request; uncertain, it is not.
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
    study = {s: {n: [x * f for f in noise] for n, x in own.items()} for s, own in rates.items()}
    found = [x for x in verdict(results_of(study), "GPUs") if x.startswith("Request")]
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


def test_a_gap_before_the_size_at_which_a_series_falls_below_is_said() -> None:
    """At 64 of 1, 3, 8, 64: the limit may be anywhere between."""
    wide = {n: [100 * n / (1 + 0.01 * (n - 1)) * x for x in (1, 1.01)] for n in (1, 3, 8, 64)}
    (line,) = [x for x in said(wide) if "falls below" in x]
    assert line.endswith("It was not measured between 8 and 64 GPUs.")
    close = {n: [100 * n / (1 + 0.05 * (n - 1)) * x for x in (1, 1.01)] for n in (1, 2, 4, 8)}
    assert not [x for x in said(close) if "It was not measured" in x]


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


def test_a_forecast_says_that_it_leaves_out_a_size_on_more_nodes() -> None:
    """ "Every measured size is on one node" was said of a study with 4 ranks on 2 nodes."""
    sizes = {(1, 1): [1000.0, 1001], (2, 1): [1960.0, 1961], (4, 1): [3800.0, 3801]}
    for more, words in (
        ({}, "Every measured size of ddp is on one node"),
        ({(4, 2): [3300.0, 3301]}, "The forecast of ddp uses its sizes on one node only, so what "),
    ):
        results = on_nodes({**sizes, **more})
        lines = verdict(results, "GPUs", forecasts=forecasts(results, (8,)))
        assert any(x.startswith(words) for x in lines)


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


def test_comparisons_are_counted_where_the_kind_of_scaling_is_not_stated() -> None:
    rows = runs_of({s: {1: [100.0, 101], 2: [180.0, 181]} for s in ("a", "b")})
    results = results_from(frame([row | {"scaling": None} for row in rows], RESULTS))
    assert any(x.startswith("2 of 4 comparisons") for x in verdict(results, "GPUs"))


def test_more_than_ideal_is_remarked_with_its_usual_reasons() -> None:
    lines = said({1: [60.0, 61, 100], 2: [185.0, 186, 187]})
    (line,) = [line for line in lines if "of ideal scaling" in line]
    assert line.startswith("ddp is measured at 152% of ideal scaling on 2 GPUs.")
    assert "slow runs on 1 GPU, the baseline" in line


def test_it_says_how_many_comparisons_chance_alone_would_tell_apart() -> None:
    calm = {1: [100.0, 101, 99], 2: [180.0, 181, 179], 4: [300.0, 301, 299]}
    lines = verdict(results_of({"ddp": calm, "fsdp": calm}), "GPUs")
    (line,) = [line for line in lines if "comparisons" in line]
    assert line.startswith("4 of 7 comparisons (of series at one size, of neighbouring sizes")
    assert line.endswith("were all equal, chance alone would give about 0.4.")
    of_logs = results_of({"ddp": calm, "fsdp": calm}, scaling=None)  # nobody said which it is
    assert line in verdict(of_logs, "GPUs")
    once = {n: x[:1] for n, x in calm.items()}
    assert not [line for line in said(once) if "comparisons" in line]


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


def study(seed: int) -> tuple[dict[str, dict[int, list[float]]], Truth]:
    """The rates of a study of two series by Amdahl's law, and their true rates."""
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
    made = [study(seed) for seed in range(count)]
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


def test_of_the_sentences_of_200_studies_2_in_100_are_false_at_most() -> None:
    judged = []
    for results, truth in studies(200):
        lines = verdict(results, "GPUs")
        if pd.isna(results.scaling["spread_from"]).all():
            assert any(
                "two successful repeats, so differences may be noise" in line for line in lines
            )
            continue  # said of all its differences
        judged += [(found, line) for line in lines if (found := is_true(line, truth)) is not None]
    false = [line for found, line in judged if not found]
    assert len(judged) > 100
    assert len(false) <= 0.02 * len(judged), false
