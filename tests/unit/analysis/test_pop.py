"""The factors of the POP model, and the breakdown records that they are made of."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.analysis.collect.results import collect
from jobkit.analysis.findings.causes import cause_of, factors_of, size_breakdowns
from support.fake_study import realistic_study, whole_study
from support.measured_study import step_fields

SECONDS = st.floats(1e-6, 1e3)
WAITS = st.floats(0, 1e3)
RANKS = st.lists(st.tuples(SECONDS, WAITS, WAITS), min_size=1, max_size=16)


def row(ranks, communication: float = 0.0) -> dict[str, Any]:
    """The columns of ranks that each spend (compute, data wait, other) seconds."""
    fields = step_fields(*zip(*ranks, strict=True), communication)
    return {f"breakdown_{name}": value for name, value in fields.items()}


@given(RANKS, WAITS, RANKS, WAITS, st.integers(1, 10_000), st.integers(1, 10_000))
def test_products_are_exact(ranks, wait, base, base_wait, samples, base_samples) -> None:
    """And no loss is a gain."""
    one, first = row(ranks, wait), row(base, base_wait)
    own = factors_of(one, len(ranks), samples)
    start = factors_of(first, len(base), base_samples)
    for name in ("load_balance", "data_wait", "communication"):
        assert 0 < own[name] <= 1 + 1e-12
    # Relative to the base, their product is the efficiency that a clock measures.
    rate = samples / one["breakdown_iteration_s"] / len(ranks)
    measured = rate / (base_samples / first["breakdown_iteration_s"] / len(base))
    assert math.prod(own.values()) / math.prod(start.values()) == pytest.approx(measured)


def test_a_record_that_does_not_say_all_or_contradicts_itself_is_none() -> None:
    fields = row([(1.0, 0.1, 0.1)])
    assert factors_of(fields, 1, 1)
    for wrong in (None, math.nan, -1.0, math.inf, 0.5):
        assert not factors_of(fields | {"breakdown_useful_max_s": wrong}, 1, 1), wrong


def test_a_study_says_where_its_efficiency_goes() -> None:
    realistic_study(sizes=(1, 4, "4x4"), repeats=1)
    results = collect("s", write=False)
    own = [one for one in size_breakdowns(results) if one.size.series == "fsdp"]
    measured = [math.prod(one.own.values()) / math.prod(one.base.values()) for one in own]
    assert measured == pytest.approx([one.size.efficiency for one in own], rel=0.03)
    share = 1 - own[2].own["communication"]
    cause = f", because exposed communication takes {share:.0%} of the step"
    assert cause_of(results, own[2].size) == cause
    assert {cause_of(results, s) for s in results.sizes if s.efficiency == 1} == {""}


def test_without_breakdowns_the_wait_for_data_explains_what_it_explains() -> None:
    whole_study(strategies=("ddp",), gpus=(1, 4))
    results = collect("s", write=False)
    assert size_breakdowns(results) == []
    last = results.sizes[-1]
    assert last.efficiency == pytest.approx(0.925)
    differ = "; no recorded device, version or node differs"
    outside = "; 100% of the loss is outside of what was measured"
    words = "waiting for data takes 8% of the time"
    for waits, said in (
        ([0.01, 0.01], outside + differ),
        ([0.01, 0.085], f", because {words}"),
        (None, "; what it is lost to was not measured"),
    ):
        waiting = results.runs.assign(data_wait_share=waits)
        assert cause_of(replace(results, runs=waiting), last) == said
    whole_study("n", strategies=("ddp",), gpus=(1, "2x2"))
    results = collect("n", write=False)
    apart = results.runs.assign(data_wait_share=0.01, node_list=results.runs["run_id"])
    assert cause_of(replace(results, runs=apart), results.sizes[-1]) == f"{outside}; 2 nodes, not 1"
