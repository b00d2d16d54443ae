"""The step model: measured links, fits to made-up steps, sizes held out."""

import random

import pytest

from jobkit.analysis.findings.step_fit import Point, StepModel, fit_steps, held_out
from jobkit.analysis.findings.step_links import links_of
from jobkit.errors import UsageError
from jobkit.metric import comm
from jobkit.spec.traffic import Link, Links, Message, Scope, measured, message_s, seconds

FAST, SLOW = Link(1e-6, 1e-9), Link(10e-6, 4e-9)
LINKS = Links(FAST, SLOW)
REAL = StepModel(fixed_s=2e-3, per_sample_s=50e-6, overlap_share=0.4)
BATCH = 512


def line(operation: str, scope: str, ranks: int, nodes: int, link: Link) -> comm.Line:
    """What the benchmark would fit to an operation over such links."""
    latency, both = (
        message_s(Message(operation, size, Scope(ranks, nodes)), Links(link, link))
        for size in (0, 1e9)
    )
    slope = (both - latency) / 1e9
    return comm.Line(
        operation=operation,
        scope=scope,
        ranks=ranks,
        nodes=nodes,
        latency_s=latency,
        s_per_byte=slope,
        worst_share=0.0,
        sizes=9,
    )


def same(found: Link | None, expected: Link | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return (found.latency_s, found.s_per_byte) == pytest.approx(
        (expected.latency_s, expected.s_per_byte)
    )


def test_links_are_those_that_the_benchmark_went_over() -> None:
    pairs = [
        line("sendrecv", "intra_node", 2, 1, FAST),
        line("sendrecv", "inter_node", 2, 2, SLOW),
    ]
    other = Link(3e-6, 3e-9)
    cases = {
        (): (None, None),
        (*pairs,): (FAST, SLOW),
        (*pairs, line("all_reduce", "all", 4, 1, other)): (other, SLOW),
        (*pairs, line("all_reduce", "all", 4, 4, other)): (FAST, other),
        (*pairs, line("all_reduce", "all", 4, 2, other)): (FAST, SLOW),  # a mix of both kinds
    }
    for lines, (intra, inter) in cases.items():
        found = links_of(lines)
        assert same(found.intra, intra) and same(found.inter, inter), lines


def test_a_collective_costs_what_was_measured_of_it() -> None:
    """A library may move more for one than its ring would."""
    other = Link(9e-6, 9e-9)
    own = line("reduce_scatter", "all", 4, 4, other)
    found = links_of([line("all_reduce", "all", 4, 4, SLOW), own])
    assert same(found.own["reduce_scatter"].inter, other)
    assert "all_gather" not in found.own  # not measured: as the all-reduce says
    one = [Message("reduce_scatter", 4e6, Scope(4, 4), 2)]
    taken = 2 * (own.latency_s + 4e6 * own.s_per_byte)
    assert seconds(one, found) == pytest.approx(taken)
    assert seconds(one, Links(FAST, SLOW)) < taken
    # Inside a node nothing of it was measured: what is known of the link there counts.
    inside = links_of([line("sendrecv", "intra_node", 2, 1, FAST), own])
    assert same(inside.own["reduce_scatter"].intra, FAST)


def test_a_collective_measured_on_as_many_ranks_needs_no_formula() -> None:
    """Where two ranks were measured, what eight of them say of a ring does not count."""
    eight, two = line("all_reduce", "all", 8, 8, SLOW), line("all_reduce", "all", 2, 2, FAST)
    message = Message("all_reduce", 4e6, Scope(2, 2))
    by_ring = message_s(message, links_of([eight]))
    found = links_of([two, eight])
    assert message_s(message, found) == pytest.approx(two.latency_s + 4e6 * two.s_per_byte)
    assert message_s(message, found) < by_ring
    assert found == links_of([eight, two])  # in any order
    # Of four nothing was measured: the links are those of the largest measurement.
    four = Message("all_reduce", 4e6, Scope(4, 4))
    assert message_s(four, found) == pytest.approx(message_s(four, links_of([eight])))
    assert measured(message, found) and measured(four, found) is None
    # Two groups that use the nodes' network at once were not measured so.
    assert measured(Message("all_reduce", 4e6, Scope(2, 2, 2)), found) is None


# --- the model of a step ---------------------------------------------------------------------


def points(real: StepModel, sizes, size_bytes: float = 8e6, noise: float = 0.0, weak=False):
    """Measured sizes as the model says, with a relative noise."""
    draw, made = random.Random(1), []
    for n in sizes:
        samples = 64 if weak else BATCH / n
        sent = message_s(Message("all_reduce", size_bytes, Scope(n)), LINKS)
        step = real.step_s(Point(n, samples, sent, 0.0)) * (1 + noise * draw.uniform(-1, 1))
        made.append(Point(n, samples, sent, step))
    return made


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1, 2, 4, 8), (1, 4, 16)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_the_unknowns_of_a_step_are_found(sizes, share: float) -> None:
    real = StepModel(2e-3, 50e-6, share)
    found = fit_steps(points(real, sizes, 30e6))
    assert all(
        p.communication_s > share * real.compute_s(p.samples)
        for p in points(real, sizes, 30e6)
        if p.ranks > 1
    )
    assert found.fixed_s == pytest.approx(real.fixed_s, rel=0.02)
    assert found.per_sample_s == pytest.approx(real.per_sample_s, rel=0.01)
    assert found.overlap_share == pytest.approx(share, abs=0.01)


def test_communication_that_is_hidden_at_first_and_shows_later() -> None:
    real = StepModel(0.0, 50e-6, 0.5)
    made = points(real, (1, 2, 4, 8), 2e6)
    exposed = [real.exposed_s(p.samples, p.communication_s) > 0 for p in made]
    assert exposed == [False, False, False, True]
    found = fit_steps(made)
    for p in made:
        assert found.step_s(p) == pytest.approx(p.step_s, rel=1e-3)


def test_weak_scaling_has_one_time_a_sample() -> None:
    real = StepModel(0.0, 50e-6, 0.3)
    found = fit_steps(points(real, (1, 2, 4), weak=True))
    assert found.fixed_s == 0
    assert found.per_sample_s == pytest.approx(50e-6, rel=1e-3)
    assert found.overlap_share == pytest.approx(0.3, abs=0.01)


def test_held_out_sizes_are_predicted() -> None:
    real = StepModel(0.0, 50e-6, 0.2)
    tests = held_out(points(real, (8, 4, 2, 1), 30e6))
    assert [(t.fitted, t.ranks) for t in tests] == [((1, 2), 4), ((1, 2), 8), ((1, 2, 4), 8)]
    assert all(abs(t.error_share) < 1e-3 for t in tests)
    noisy = held_out(points(REAL, (1, 2, 4, 8), 30e6, noise=0.01))
    (last,) = [t for t in noisy if t.fitted == (1, 2, 4)]
    assert 0 < abs(last.error_share) < 0.1


def test_an_error_has_its_sign() -> None:
    made = points(StepModel(0.0, 50e-6, 0.2), (1, 2, 4), 30e6)
    slower = Point(4, made[2].samples, made[2].communication_s, 1.25 * made[2].step_s)
    (test,) = held_out([*made[:2], slower])
    assert test.error_share == pytest.approx(-0.2, abs=1e-3)


@pytest.mark.parametrize("sizes", [(), (1,), (1, 2)])
def test_too_few_sizes_are_refused(sizes) -> None:
    with pytest.raises(UsageError, match="3 sizes are needed"):
        held_out(points(REAL, sizes))


def test_one_size_is_no_fit() -> None:
    with pytest.raises(UsageError, match="needs 2 sizes, and 1 was measured"):
        fit_steps(points(REAL, (2,)))
