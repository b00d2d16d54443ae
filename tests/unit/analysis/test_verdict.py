"""The sentences of the verdict, against the truth of made-up studies."""

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

from jobkit.analysis.collect.results import Results
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


def test_a_dip_and_a_recovery_are_both_said() -> None:
    calm = {1: [100.0, 100.2], 2: [154.0, 154.2], 4: [340.0, 340.5], 8: [688.0, 689.0]}
    (line,) = [line for line in said(calm) if "falls below" in line]
    assert "at 2 GPUs: 77.0%" in line
    assert line.endswith("At 4 GPUs and 8 GPUs it is measured at 80% or above again.")


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
    unstated = results_of({"ddp": calm, "fsdp": calm}, scaling=None)  # strong or weak
    assert line in verdict(unstated, "GPUs")
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
    if found := re.match(rf"Request {GPUS} with (\w+): the next size is already", line):
        return share(found[2], 2 * int(found[1])) < 0.8
    if found := re.match(rf"Request {GPUS} with (\w+): speed-up", line):
        return all(share(found[2], n) >= 0.8 for n in SIZES if n <= int(found[1]))
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
