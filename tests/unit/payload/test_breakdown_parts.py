"""The breakdown record from made-up iterations: what is injected is attributed where it belongs."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobkit.analysis.scaling.pop import Step, breakdown, efficiencies
from jobkit.payload.measure.parts import Parts, record

COMPUTE, COMM, WAIT, STEP = 0.1, 0.005, 0.001, 0.002  # seconds
FIRST_FOUR = ("compute_s", "communication_s", "data_wait_s", "other_s")


def iterations(
    ranks: int = 2,
    count: int = 10,
    slow: Any = lambda rank, i: 0.0,
    comm: float = COMM,
    replica: Any = lambda i: 0.0,
    step: Any = lambda rank: STEP,
) -> list[list[Parts]]:
    """Iterations in which the ranks wait for each other at the end of the backward pass.

    slow(rank, i): more compute. replica(i): by how much the replica's pass takes longer.
    """
    noise = random.Random(1)
    made: list[list[Parts]] = [[] for _ in range(ranks)]
    for i in range(count):
        own = [COMPUTE + slow(rank, i) + noise.gauss(0, 1e-4) for rank in range(ranks)]
        passes = max(own) + comm
        for rank in range(ranks):
            waited = passes - own[rank]
            alone = own[rank] + replica(i)
            wall = passes + WAIT + step(rank)
            made[rank].append(Parts(wall, WAIT, passes, alone, step(rank), waited=waited))
    return made


def factors(found: dict[str, Any]) -> Any:
    times = breakdown(found)
    assert times is not None
    one = Step(times, 2, 64)
    return efficiencies(one, one)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({}, {"communication_s": COMM, "load_balance": 1, "random_balance": 1, "certain": 1}),
        # One rank's step, and one rank's computation, take longer in every iteration.
        (
            {"step": lambda rank: STEP + 0.08 * rank},
            {"last_rank_wait_s": 0.04, "load_balance": 142 / 182},
        ),
        ({"slow": lambda rank, i: 0.1 * rank}, {"load_balance": 0.75, "random_balance": 1}),
        # The replica is slow throughout.
        (
            {"comm": 0.05, "replica": lambda i: 0.045},
            {"communication_s": 0.005, "communication_direct_s": 0.05, "certain": 0},
        ),
    ],
)
def test_what_was_injected_is_found(made: Any, expected: dict[str, float]) -> None:
    found = record(iterations(**made))
    values = found | vars(factors(found))
    assert {n: values[n] for n in expected} == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "second", "cold"),
    [(2, True, 0), (4, True, 4), (8, True, 4), (8, False, 0)],
)
def test_the_wait_for_ranks_slow_in_turn_is_no_communication(
    ranks: int, second: bool, cold: int
) -> None:
    """Each iteration another rank takes twice as long; the replica may begin with slow passes.

    second: the communication is measured a second time, which makes the result certain.
    """
    made = iterations(
        ranks=ranks,
        count=16,
        slow=lambda rank, i: 0.1 * (rank == i % ranks),
        replica=lambda i: 0.3 * (i < cold),
    )
    if not second:
        made = [[replace(parts, waited=None) for parts in one] for one in made]
    found = record(made)
    mean, most = COMPUTE + 0.1 / ranks + STEP, COMPUTE + 0.1 + STEP
    one, wall = factors(found), most + COMM + WAIT
    assert one.communication == pytest.approx((most + WAIT) / wall, abs=0.01)
    assert one.load_balance == pytest.approx(1, abs=0.01)
    assert one.random_balance == pytest.approx(mean / most, abs=0.01)
    assert one.parallel == pytest.approx(mean / wall, abs=0.01)
    assert found["certain"] is (True if second else None)
    assert (found["communication_direct_s"] is None) is not second
    times = breakdown(found)
    assert times is not None
    assert times.messages_s == pytest.approx(COMM, abs=0.001)
    assert times.slower_ranks_s == pytest.approx(most - mean, rel=0.03)


def test_a_rank_that_the_machine_disturbs_is_slow_itself() -> None:
    """In the training, in turn, while no replica sees it: the second measure does."""
    ranks = 4
    sound = iterations(ranks=ranks, count=16, slow=lambda rank, i: 0.1 * (rank == i % ranks))
    made = [[replace(p, alone=min(p.alone, COMPUTE)) for p in one] for one in sound]
    found = record(made)
    assert factors(found).communication == pytest.approx(0.976, abs=0.01)
    assert factors(found).parallel == pytest.approx((0.102 + 0.1 / ranks) / 0.208, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_rank_is_told_from_others_that_are_slow_in_turn(seed: int) -> None:
    """Rank 3 takes 50 ms more in each iteration; one of the others, by chance, 100 ms."""
    draw = random.Random(seed)
    who = [draw.randrange(3) for _ in range(40)]
    made = iterations(
        ranks=4, count=40, slow=lambda rank, i: 0.05 if rank == 3 else 0.1 * (rank == who[i])
    )
    found = record(made)
    assert found["useful_max_s"] == pytest.approx(COMPUTE + 0.05 + STEP, rel=0.03)
    assert factors(found).random_balance == pytest.approx(150 / 200, abs=0.03)


def test_a_slow_network_in_some_iterations_is_neither_imbalance_nor_computation() -> None:
    made = iterations(count=12, comm=0.02)
    late = [
        [replace(p, passes=p.passes + 0.3 * (i % 6 == 0), wall=p.wall + 0.3 * (i % 6 == 0))
         for i, p in enumerate(one)]
        for one in made
    ]  # fmt: skip
    late = [[replace(p, waited=p.passes - p.alone) for p in one] for one in late]
    found = record(late)
    assert found["useful_max_s"] == pytest.approx(COMPUTE + STEP, rel=0.02)
    assert found["random_imbalance_s"] < 0.002


SECONDS = st.floats(0, 0.5)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(st.tuples(*[SECONDS] * 5, st.booleans()), min_size=ranks, max_size=ranks),
            min_size=3,
            max_size=9,
        )
    )
)
def test_whatever_was_measured_the_parts_add_up_and_no_factor_is_above_1(drawn: Any) -> None:
    """Each rank's time one after the other, as on a CPU; the replica may take any time."""
    everyone = []
    for rank in zip(*drawn, strict=True):
        found = []
        for wait, passes, alone, step, other, checked in rank:
            wall = wait + passes + step + other + 1e-3
            waited = passes / 2 if checked else None
            found.append(Parts(wall, wait, passes, alone, step, waited=waited))
        everyone.append(found)
    found = record(everyone)
    total = sum(found[name] for name in (*FIRST_FOUR, "last_rank_wait_s"))
    assert total == pytest.approx(found["iteration_s"])
    times = breakdown(found)
    if times is not None:  # a rank may compute nothing
        one = factors(found)
        for value in (one.load_balance, one.random_balance, one.data_wait, one.communication):
            assert 0 <= value <= 1 + 1e-6


def test_a_record_whose_parts_are_missing_or_impossible_is_no_breakdown() -> None:
    found = record(iterations())
    assert breakdown(found) is not None
    wrong: list[Any] = [{n: None} for n in (*FIRST_FOUR, "iteration_s", "useful_max_s")]
    wrong += [{"busy_max_s": None}, {"iteration_s": 0.0}, {"useful_max_s": 0.0}]
    wrong += [{"busy_max_s": 1e9}, {"compute_s": -1.0}, {"communication_s": float("nan")}]
    wrong += [{"data_wait_s": "0.1"}]
    assert [w for w in wrong if breakdown({**found, **w}) is not None] == []
