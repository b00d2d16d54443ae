"""The step model: collectives on paper, fits to made-up truths, sizes held out."""

import random

import pytest

from jobkit.analysis.findings.step_fit import Point, StepModel, fit_steps, held_out
from jobkit.analysis.findings.step_links import (
    Link,
    Links,
    Message,
    communication_s,
    fastest_all_reduce,
    links_of,
    ring_all_reduce,
    ring_pass,
    tree_all_reduce,
)
from jobkit.errors import UsageError
from jobkit.metric import comm

FAST, SLOW = Link(1e-6, 1e-9), Link(10e-6, 4e-9)
LINKS = Links(FAST, SLOW)
TRUTH = StepModel(fixed_s=2e-3, per_sample_s=50e-6, overlap_share=0.4)
BATCH = 512


# --- collectives -----------------------------------------------------------------------------


def test_one_rank_talks_to_nobody() -> None:
    for how in (ring_pass, ring_all_reduce, tree_all_reduce, fastest_all_reduce):
        assert how(1e9, 1, 1, Links(None, None)) == 0


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        (2, 1, 1e-6 + 1e6 / 2 * 1e-9),
        (4, 1, 3e-6 + 1e6 * 3 / 4 * 1e-9),
        (4, 2, 1e-6 + 20e-6 + 1e6 * 3 / 4 * 4e-9),  # of three hops two between nodes
        (2, 2, 10e-6 + 1e6 / 2 * 4e-9),
        (8, 2, 5e-6 + 20e-6 + 1e6 * 7 / 8 * 4e-9),
    ],
)
def test_a_pass_around_the_ring(ranks: int, nodes: int, expected: float) -> None:
    assert ring_pass(1e6, ranks, nodes, LINKS) == pytest.approx(expected)
    assert ring_all_reduce(1e6, ranks, nodes, LINKS) == pytest.approx(2 * expected)


def test_a_tree_has_fewer_hops_and_moves_more() -> None:
    assert tree_all_reduce(1e6, 8, 1, LINKS) == pytest.approx(2 * (3e-6 + 1e-3))
    assert tree_all_reduce(0, 8, 2, LINKS) == pytest.approx(2 * (2e-6 + 10e-6))
    for size in (1.0, 1e9):
        both = [f(size, 8, 1, LINKS) for f in (ring_all_reduce, tree_all_reduce)]
        assert fastest_all_reduce(size, 8, 1, LINKS) == min(both)
        assert (both[0] < both[1]) == (size > 1)


def test_messages_add_up() -> None:
    sent = [Message("all_reduce", 1e6, 3), Message("all_gather", 2e6)]
    expected = 3 * ring_all_reduce(1e6, 4, 1, LINKS) + ring_pass(2e6, 4, 1, LINKS)
    assert communication_s(sent, 4, 1, LINKS) == pytest.approx(expected)
    tree = communication_s(sent, 4, 1, LINKS, "tree") - ring_pass(2e6, 4, 1, LINKS)
    assert tree == pytest.approx(3 * tree_all_reduce(1e6, 4, 1, LINKS))


@pytest.mark.parametrize(
    ("links", "ranks", "nodes", "text"),
    [
        (Links(FAST, None), 4, 2, "between nodes is not known.*--inter"),
        (Links(None, SLOW), 4, 2, "inside a node is not known.*--intra"),
        (Links(None, SLOW), 2, 1, "inside a node is not known"),
    ],
)
def test_a_link_that_is_not_known_is_asked_for(links: Links, ranks, nodes, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ring_pass(1.0, ranks, nodes, links)


def line(operation: str, scope: str, ranks: int, nodes: int, link: Link) -> comm.Line:
    """What the benchmark would fit to an operation over such links."""
    one = {
        "all_reduce": ring_all_reduce,
        "all_gather": ring_pass,
        "reduce_scatter": ring_pass,
        "sendrecv": lambda s, *_: link.latency_s + s * link.s_per_byte,
    }
    how = one[operation]
    latency = how(0, ranks, nodes, Links(link, link))
    slope = how(1.0, ranks, nodes, Links(link, link)) - latency
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
    measured = line("reduce_scatter", "all", 4, 4, other)
    found = links_of([line("all_reduce", "all", 4, 4, SLOW), measured])
    assert same(found.of("reduce_scatter").inter, other)
    assert same(found.of("all_gather").inter, SLOW)  # not measured: as the all-reduce says
    one = [Message("reduce_scatter", 4e6, 2)]
    taken = 2 * (measured.latency_s + 4e6 * measured.s_per_byte)
    assert communication_s(one, 4, 4, found) == pytest.approx(taken)
    assert communication_s(one, 4, 1, Links(FAST, SLOW)) < taken
    # Inside a node nothing of it was measured: what is known of the link there counts.
    inside = links_of([line("sendrecv", "intra_node", 2, 1, FAST), measured])
    assert same(inside.of("reduce_scatter").intra, FAST)


# --- the model of a step ---------------------------------------------------------------------


def points(truth: StepModel, sizes, size_bytes: float = 8e6, noise: float = 0.0, weak=False):
    """Measured sizes as the model says, with a relative noise."""
    draw, made = random.Random(1), []
    for n in sizes:
        samples = 64 if weak else BATCH / n
        sent = ring_all_reduce(size_bytes, n, 1, LINKS)
        step = truth.step_s(samples, sent) * (1 + noise * draw.uniform(-1, 1))
        made.append(Point(n, samples, sent, step))
    return made


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1, 2, 4, 8), (1, 4, 16)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_the_unknowns_of_a_truth_are_found(sizes, share: float) -> None:
    truth = StepModel(2e-3, 50e-6, share)
    found = fit_steps(points(truth, sizes, 30e6))
    assert all(
        p.communication_s > share * truth.compute_s(p.samples)
        for p in points(truth, sizes, 30e6)
        if p.ranks > 1
    )
    assert found.fixed_s == pytest.approx(truth.fixed_s, rel=0.02)
    assert found.per_sample_s == pytest.approx(truth.per_sample_s, rel=0.01)
    assert found.overlap_share == pytest.approx(share, abs=0.01)


def test_communication_that_is_hidden_at_first_and_shows_later() -> None:
    truth = StepModel(0.0, 50e-6, 0.5)
    made = points(truth, (1, 2, 4, 8), 2e6)
    exposed = [truth.exposed_s(p.samples, p.communication_s) > 0 for p in made]
    assert exposed == [False, False, False, True]
    found = fit_steps(made)
    for p in made:
        assert found.step_s(p.samples, p.communication_s) == pytest.approx(p.step_s, rel=1e-3)


def test_weak_scaling_has_one_time_a_sample() -> None:
    truth = StepModel(0.0, 50e-6, 0.3)
    found = fit_steps(points(truth, (1, 2, 4), weak=True))
    assert found.fixed_s == 0
    assert found.per_sample_s == pytest.approx(50e-6, rel=1e-3)
    assert found.overlap_share == pytest.approx(0.3, abs=0.01)


def test_held_out_sizes_are_foretold() -> None:
    truth = StepModel(0.0, 50e-6, 0.2)
    tests = held_out(points(truth, (8, 4, 2, 1), 30e6))
    assert [(t.fitted, t.ranks) for t in tests] == [((1, 2), 4), ((1, 2), 8), ((1, 2, 4), 8)]
    assert all(abs(t.error_share) < 1e-3 for t in tests)
    noisy = held_out(points(TRUTH, (1, 2, 4, 8), 30e6, noise=0.01))
    (last,) = [t for t in noisy if t.fitted == (1, 2, 4)]
    assert 0 < abs(last.error_share) < 0.1


def test_an_error_is_told_with_its_sign() -> None:
    made = points(StepModel(0.0, 50e-6, 0.2), (1, 2, 4), 30e6)
    slower = Point(4, made[2].samples, made[2].communication_s, 1.25 * made[2].step_s)
    (test,) = held_out([*made[:2], slower])
    assert test.error_share == pytest.approx(-0.2, abs=1e-3)


@pytest.mark.parametrize("sizes", [(), (1,), (1, 2)])
def test_too_few_sizes_are_refused(sizes) -> None:
    with pytest.raises(UsageError, match="3 sizes are needed"):
        held_out(points(TRUTH, sizes))


def test_one_size_is_no_fit() -> None:
    with pytest.raises(UsageError, match="needs 2 sizes, and 1 was measured"):
        fit_steps(points(TRUTH, (2,)))
