"""The efficiencies of the POP model, and the breakdown records that they are made of."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.analysis.collect.results import collect
from jobkit.analysis.findings.causes import cause_of, efficiency_table, size_breakdowns
from jobkit.analysis.scaling.pop import Step, breakdown, efficiencies
from support.fake_study import make_plan, realistic_study, whole_run
from support.measured_study import step_fields

SECONDS = st.floats(1e-6, 1e3)
WAITS = st.floats(0, 1e3)
RANKS = st.lists(st.tuples(SECONDS, WAITS, WAITS), min_size=1, max_size=16)


def step(ranks, communication: float = 0.0, samples: int = 256) -> Step:
    """An iteration of ranks that each spend (compute, data wait, other) seconds."""
    times = breakdown(step_fields(*zip(*ranks, strict=True), communication))
    assert times is not None
    return Step(times, len(ranks), samples)


@given(RANKS, WAITS, RANKS, WAITS, st.integers(1, 10_000), st.integers(1, 10_000))
def test_products_are_exact_and_no_loss_is_a_gain(
    own, wait, base, base_wait, samples, base_samples
) -> None:
    one, first = step(own, wait, samples), step(base, base_wait, base_samples)
    found, start = efficiencies(one, first), efficiencies(first, first)
    for factor in (found.load_balance, found.data_wait, found.communication):
        assert 0 < factor <= 1 + 1e-12
    useful = [compute + other for compute, _, other in own]
    assert found.useful == pytest.approx(sum(useful) / len(own) / one.times.iteration_s)
    assert found.overall == pytest.approx(found.useful * found.computation)
    # Relative to the base, it is the efficiency that a clock measures.
    rate, base_rate = samples / one.times.iteration_s, base_samples / first.times.iteration_s
    measured = (rate / len(own)) / (base_rate / len(base))
    assert found.overall / start.overall == pytest.approx(measured)


@given(RANKS, WAITS)
def test_the_parts_of_a_record_make_up_the_iteration(ranks, wait) -> None:
    times = step(ranks, wait).times
    parts = times.compute_s + times.communication_s + times.data_wait_s + times.host_s
    assert parts == pytest.approx(times.iteration_s)
    # What is left of it without the wait for slower ranks is the same on all of them.
    assert times.messages_s == pytest.approx(wait, rel=1e-6, abs=1e-6)
    assert times.messages_s + times.slower_ranks_s == pytest.approx(times.communication_s)


ONE = efficiencies(step([(1, 0.01, 0.01)]), step([(1, 0.01, 0.01)]))


@pytest.mark.parametrize(
    ("ranks", "communication", "name", "value"),
    [
        ([(1, 0.01, 0.01)] * 3 + [(2, 0.01, 0.01)], 0.0, "load_balance", 1.26 / 2.01),
        ([(1, 0.01, 0.01)] * 3 + [(1, 1.01, 0.01)], 0.0, "data_wait", 1.01 / 2.02),
        ([(1, 0.01, 0.01)] * 4, 1.0, "communication", 1.02 / 2.02),
        ([(1.8, 0.01, 0.01)] * 4, 0.0, "computation", 1.01 / 1.81),
    ],
)
def test_what_is_wrong_shows_in_its_own_factor(ranks, communication, name, value) -> None:
    """A slow rank is load imbalance, although the others wait for it in their communication.

    Its seconds are more work of all ranks, too.
    """
    one = step(ranks, communication, samples=256 * len(ranks))
    found = efficiencies(one, step([(1, 0.01, 0.01)]))
    assert getattr(found, name) == pytest.approx(value)
    factors = {k: v / getattr(ONE, k) for k, v in vars(found).items()}
    assert min(factors, key=lambda k: factors[k]) == name
    others = {"load_balance", "data_wait", "communication", "computation"} - {name}
    others -= {"computation"} if name == "load_balance" else set()
    assert all(getattr(found, other) > 0.98 for other in others)


@pytest.mark.parametrize(
    "wrong", [None, "much", math.nan, -1.0, math.inf, {"compute_s": 0, "host_s": 0}]
)
def test_a_record_that_does_not_say_all_is_none(wrong) -> None:
    fields = step_fields([1.0], [0.1], [0.1])
    fields |= wrong if isinstance(wrong, dict) else {"useful_max_s": wrong}
    assert breakdown(fields) is None


def test_a_study_says_where_its_efficiency_goes() -> None:
    realistic_study("s", sizes=(1, 4, "4x4"), repeats=1)
    results = collect("s", write=False)
    rows = results.runs[results.runs["strategy"] == "fsdp"]
    sums = rows[[f"breakdown_{k}_s" for k in ("compute", "communication", "data_wait", "host")]]
    assert sums.sum(axis=1).tolist() == pytest.approx(rows["breakdown_iteration_s"].tolist())
    found = size_breakdowns(results)
    scaling = results.scaling[results.scaling["series"] == "fsdp"]
    own = [one for one in found if one.size.series == "fsdp"]
    measured = [one.own.overall / one.base.overall for one in own]
    assert measured == pytest.approx(scaling["efficiency"].tolist(), rel=0.03)
    table = efficiency_table(found, "GPUs")
    assert [row[:3] for row in table.rows[:3]] == [
        ["ddp", "1", "1"], ["ddp", "4", "1"], ["ddp", "16", "4"]
    ]  # fmt: skip
    assert all(len(row) == len(table.heads) for row in table.rows)
    share = 1 - own[2].own.communication
    cause = f", because exposed communication takes {share:.0%} of the step"
    assert cause_of(results, own[2].size) == cause
    seen = [s for s in results.sizes if s.efficiency == 1]
    assert {cause_of(results, s) for s in seen} == {""}
    assert len(efficiency_table(found, "GPUs").notes) == 1


def test_without_breakdowns_the_wait_for_data_explains_what_it_explains() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 4))
    for run_id in plan.runs:
        whole_run(plan, run_id)
    results = collect("s", write=False)
    assert size_breakdowns(results) == []
    last = results.sizes[-1]
    assert last.efficiency == pytest.approx(0.925)
    outside = "; 100% of the loss is outside of what was measured; nothing that is recorded differs"
    assert cause_of(results, last) == outside
    waits = results.runs.assign(data_wait_share=[0.01, 0.085])
    words = ", because waiting for data takes 8% of the time"
    assert cause_of(replace(results, runs=waits), last) == words
    assert cause_of(replace(results, runs=waits.assign(data_wait_share=pd.NA)), last) == (
        "; what it is lost to was not measured"
    )
