"""Forecasts: intervals that hold, nothing impossible; measured links and what a step sends."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jobkit.analysis import cli
from jobkit.analysis.collect.results import collect
from jobkit.analysis.findings.forecast import forecast_table, forecasts, links_of
from jobkit.analysis.scaling.predict import MAX_FACTOR, Prediction
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from jobkit.errors import UsageError
from jobkit.metric import comm
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Link, Links, Message, ModelSize, Scope, seconds
from support import fake_study
from support.fake_study import logs, whole_study
from support.measured_study import results_from, results_of, runs_of

ODD = {
    "sizes from 6 on": ([6, 7, 9], [600.0, 690, 880]),
    "a huge noise": ([1, 2, 4, 8] * 2, [100.0, 900, 30, 5000, 7, 20, 3000, 10]),
    "a rate of almost nothing": ([1, 2, 4], [1e-300, 1e-300, 1e-300]),
    "a rate beyond all": ([1, 2, 4], [1e300, 1e300, 1e300]),
    "super-linear by far": ([1, 2, 4], [100.0, 1000, 10_000]),
    "the same to the last digit": ([1, 2, 4, 8], [100.0, 200, 400, 800]),
    "above ideal": ([1, 2, 4], [1000.0, 2200, 4900]),
    "slower on more": ([1, 2, 4], [1000.0, 1900, 1500]),
    "the same on more": ([1, 2, 4], [1000.0, 1000, 1000]),
}


def test_odd_curves_have_a_forecast_in_order_and_below_ideal_or_a_reason() -> None:
    """Fitted laws gave a speed-up of -189, and an OverflowError."""
    plain = ((name, None) for name in ODD)
    for name, per_node in (*plain, ("sizes from 6 on", 1), ("above ideal", 4)):
        sizes, rates = ODD[name]
        found = Prediction(sizes, rates, per_node=per_node)
        # Ideal is the best that was measured; an interval has the noise of a run beyond it.
        gained = max(rate / n for n, rate in zip(sizes, rates, strict=True)) / rates[0] * sizes[0]
        for ranks in (max(sizes) + 1, 4 * max(sizes), 1000 * max(sizes)):
            shown = found.speed_up(ranks), found.rate(ranks)
            assert all(0 < low <= value <= high < np.inf for value, low, high in shown), name
            if name != "a huge noise":
                assert shown[0][0] <= 1.02 * gained * ranks / sizes[0]
                assert shown[0][2] <= 1.2 * gained * ranks / sizes[0]
            widest = max(high / low for _, low, high in shown)
            assert bool(found.refused(ranks)) == (widest > MAX_FACTOR)


def test_two_sizes_are_refused_and_the_same_runs_give_the_same() -> None:
    with pytest.raises(UsageError, match=r"needed for a fit \(measured: 1, 2\)"):
        Prediction([1, 1, 2], [1.0, 1.0, 2.0])
    one, other = (Prediction([1, 2, 4], [10.0, 19.0, 36.0]).rate(8) for _ in range(2))
    assert one == other


def test_the_cost_of_a_node_boundary_is_held() -> None:
    """Eight ranks a node, and a second node that costs 40 %: no size on one node shows it."""
    sizes, within = [1, 2, 4, 8], [100.0, 196, 388, 768]
    blind, told = Prediction(sizes, within), Prediction(sizes, within, per_node=8)
    assert told.rate(16)[0] < blind.rate(16)[0]
    assert told.rate(16)[1] < 768 * 2 / 1.4 < told.rate(16)[2]
    # Seen once, it is known: two nodes that cost 40 %, and four half as much again, as a ring over
    # them in weak scaling; in strong scaling, where the compute shrinks, the same ring costs more.
    seen = Prediction([*sizes, 16], [*within, 768 * 2 / 1.4], "weak", per_node=8)
    assert seen.rate(32)[1] < 768 * 4 / 1.6 < seen.rate(32)[2]
    strong = Prediction([*sizes, 16], [*within, 768 * 2 / 1.4], "strong", per_node=8)
    assert strong.rate(32)[0] < 0.8 * seen.rate(32)[0]
    assert strong.rate(32)[1] < 768 * 4 / 2.2 < strong.rate(32)[2]
    assert seen.rate(32)[2] / seen.rate(32)[1] < told.rate(32)[2] / told.rate(32)[1]
    # Measured one to a node, though a node has room for eight.
    rates, places = [196.0, 388, 768], {2: 2, 4: 4, 8: 8}
    value, low, high = Prediction([2, 4, 8], rates, per_node=8, nodes=places).rate(16)
    assert low < 1500 < high and value > Prediction([2, 4, 8], rates, per_node=8).rate(16)[0]


def test_hidden_communication_surfaces_in_strong_scaling() -> None:
    """An all-reduce of 4 % of a one-rank step hides behind half of the compute, to 8 ranks."""
    sizes = [1, 2, 4, 8]
    rates = [100 / (1 / n + max(0.0, 0.04 * (1 - 1 / n) - 0.5 / n)) for n in (*sizes, 32)]
    strong, weak = (Prediction(sizes, rates[:4], scaling) for scaling in ("strong", "weak"))
    assert rates[3] == 800  # no measured size shows it
    value, low, high = strong.rate(32)
    assert low < rates[4] < high
    assert value < weak.rate(32)[0]
    assert high / low > weak.rate(32)[2] / weak.rate(32)[1]


def test_where_nobody_says_it_a_node_may_end_anywhere_beyond_the_measured_sizes() -> None:
    """The all-reduce hides on one node; between nodes of 8 it takes 4 or 10 times as long."""

    def rate(n: int, nodes: int, between: float = 0.08) -> float:
        sent = 0.02 * (1 - 1 / n) + between * (1 - 1 / nodes)
        return 100 / (1 / n + max(0.0, sent - 0.5 / n))

    sizes = [1, 2, 4, 8]
    rates, places = [rate(n, 1) for n in sizes], dict.fromkeys(sizes, 1)
    unknown = Prediction(sizes, rates, nodes=places)
    _, low, high = unknown.rate(16)
    assert low < rate(16, 2, 0.2) < rate(16, 2) < high
    assert "measure larger sizes, on several nodes too" in unknown.refused(32)
    assert not Prediction(sizes, rates, per_node=64, nodes=places).refused(32)


def test_a_jump_above_ideal_stays_as_when_the_data_fit_the_caches() -> None:
    noise = np.random.default_rng(5).normal(0, 0.01, (4, 3))
    rates = np.array([1000, 2000, 5200, 10400])[:, None] * np.exp(noise)
    found = Prediction(np.repeat([1, 2, 4, 8], 3).tolist(), rates.ravel().tolist())
    for ranks in (16, 32):
        _, low, high = found.rate(ranks)
        assert low < 1300 * ranks < high < 1.5 * 1300 * ranks
    # By chance alone there is none: the largest size is 1 % above, and a run is 1 % off.
    calm = Prediction([1, 2, 4, 1, 2, 4], [1000, 2000, 4040, 1010, 2020, 4080])
    assert calm.speed_up(8)[0] <= 8


def test_it_widens_with_the_repeats_and_the_distance_until_it_is_refused() -> None:
    factors = [1.3, 0.8, 1.0, 0.7, 1.4, 1.1, 1.0, 0.75, 1.3]
    rates = [1000 * 2 ** (i // 3) * factor for i, factor in enumerate(factors)]
    _, low, high = Prediction([1] * 3 + [2] * 3 + [4] * 3, rates).rate(8)
    assert high > 1.3 * 8000 and low < 8000 / 1.3  # above ideal too
    weak = Prediction([1, 2, 4], [300, 587, 1172], "weak", 64)  # it falls by 2 %
    widths = [weak.rate(n)[2] / weak.rate(n)[1] for n in (8, 16, 32, 64, 1024)]
    assert widths == sorted(widths)
    assert weak.refused(8) == ""
    assert "the 95 % interval of a forecast to 1024 ranks spans a factor of" in weak.refused(1024)
    assert widths[0] < MAX_FACTOR < widths[-1]


def test_a_loss_at_each_doubling_is_held() -> None:
    """Weak scaling that loses by log2 N was held in 39 of 100."""
    generator = np.random.default_rng(4)
    sizes, held = np.repeat([1, 2, 4, 8, 16], 3), 0
    for _ in range(12):
        noise = 1 + 0.03 * generator.standard_normal(len(sizes))
        found = Prediction(sizes, sizes / (1 + 0.05 * np.log2(sizes)) * noise)
        _, low, high = found.rate(64)
        held += low <= 64 / 1.3 <= high
    assert held >= 11


FAST, SLOW = Link(1e-6, 1e-9), Link(10e-6, 4e-9)
LINKS = Links(FAST, SLOW)
BATCH = 512


def line(operation: str, scope: str, ranks: int, nodes: int, times: Link) -> comm.Line:
    facts = {"operation": operation, "scope": scope, "ranks": ranks, "nodes": nodes}
    return comm.Line(**facts, **vars(times), worst_share=0.0)


def test_links_are_those_that_the_benchmark_went_over() -> None:
    pairs = [line("sendrecv", "intra_node", 2, 1, FAST), line("sendrecv", "inter_node", 2, 2, SLOW)]
    # Of four ranks a ring has three hops, twice, and each link carries 1.5 times the bytes.
    other, ring = Link(3e-6, 3e-9), Link(18e-6, 4.5e-9)
    for nodes, expected in ((1, (other, SLOW)), (4, (FAST, other)), (2, (FAST, SLOW))):
        found = links_of([line("all_reduce", "all", 4, nodes, ring), *pairs])
        for link, one in zip((found.intra, found.inter), expected, strict=True):
            assert link and vars(link) == pytest.approx(vars(one)), nodes  # two: of both kinds
    assert links_of(pairs) == LINKS
    with pytest.raises(UsageError, match="no line fits its sizes within 50 %"):
        links_of([replace(line, worst_share=0.6) for line in pairs])


def sent(**counts: tuple[int, int]) -> list[Message]:
    """Messages of a step over four ranks by their operation: their bytes, and how many."""
    return [Message(name, size, Scope(4), n) for name, (size, n) in counts.items()]


KEPT = {"strategy": "fsdp", "kept_groups": (2000,)}
MESSAGES = [
    ({}, sent(all_reduce=(20 << 20, 2))),
    ({"ddp_comm_hook": "bf16"}, sent(all_reduce=(10 << 20, 2))),
    ({"ddp_comm_hook": "powersgd"}, None),
    ({"strategy": "fsdp"}, sent(all_gather=(40 << 20, 2), reduce_scatter=(40 << 20, 1))),
    (KEPT | {"precision": "bf16", "accumulate": 3, "shard_groups": (4000,)},
     [*sent(all_gather=(2000, 6), reduce_scatter=(4000, 1)),
      *sent(all_gather=(1000, 3), reduce_scatter=(2000, 1))]),
    (KEPT | {"precision": "fp16", "fsdp_reduce_fp32": False, "fsdp_reshard_after_forward": False},
     sent(all_gather=(1000, 1), reduce_scatter=(1000, 1))),
    (KEPT | {"nodes": 2, "fsdp_hybrid_replicas": 2},
     [*sent(all_gather=(2000, 1), reduce_scatter=(2000, 1)),
      Message("all_reduce", 500, Scope(2, 2, 4))]),
    ({"strategy": "pp"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("run", "expected"), MESSAGES)
def test_what_a_step_sends(run: dict[str, Any], expected: list[Message] | None) -> None:
    groups = {k: run[k] for k in ("shard_groups", "kept_groups") if k in run}
    spec = RunSpec(**{"ranks_per_node": 4} | {k: v for k, v in run.items() if k not in groups})
    size = ModelSize(parameters=40 << 20, **groups)
    assert FACTS[spec.strategy].messages(spec.to_dict(), size) == expected


# --- studies ---------------------------------------------------------------------------------


def modelled(spec) -> float:
    """The rate of a run whose steps follow a known model over LINKS: a tenth can be hidden."""
    n = spec.world_size
    compute = 50e-6 * BATCH / n
    sent = seconds([Message("all_reduce", 620362 * 4, Scope(n, spec.nodes))], LINKS)
    step = compute + max(0.0, sent - 0.1 * compute)
    return BATCH / step * (1 + 1e-3 * (spec.repeat - 1))


@pytest.fixture
def modelled_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_study, "rate", modelled)
    whole_study("s", strategies=("ddp",), gpus=(1, 2, 4, 8), repeats=3)


def test_measured_links_say_what_a_second_node_costs(modelled_study: None) -> None:
    """The link between nodes is four times slower: no size on one node shows it."""
    results = collect("s", write=False)
    (blind,), _ = forecasts(results, (16,), per_node=8)
    (known,), reasons = forecasts(results, (16,), per_node=8, links=LINKS)
    truth = modelled(RunSpec(nodes=2, ranks_per_node=8))
    assert known.prediction.rate(16)[0] == pytest.approx(truth, rel=0.12)
    value, low, high = known.prediction.rate(16)
    assert low <= truth <= high and high / low < 1.6
    assert abs(blind.prediction.rate(16)[0] / truth - 1) > abs(value / truth - 1)
    assert reasons == []
    said = "on 16 ranks ddp is slower than on 8, which was measured: do not request more"
    assert known.notes == (said,)
    assert blind.notes[0].endswith("costs is a guess: measure one size on two nodes")
    (nowhere,), _ = forecasts(replace(results, runs=results.runs.assign(nodes=None)), (16,))
    assert nowhere.notes[0].endswith("costs is a guess: say --gpus-per-node")
    (line,) = forecast_table(results, [known]).to_dict("records")
    assert (line["nodes"], line["law"]) == (2, "measured links")
    assert line["node_hours"] == pytest.approx(2 * line["time_s"] / 3600)
    unsaid = replace(results, runs=results.runs.assign(parameters=None))
    hook = {"ddp_comm_hook": "powersgd"}
    whole_study("h", strategies=("ddp",), gpus=(1, 2, 4, 8), repeats=3, settings=hook)
    for study, links, why in (
        (
            collect("h", write=False),
            LINKS,
            "what the hook powersgd sends does not follow from the size",
        ),
        (results, Links(FAST, None), "the link between nodes is not known"),
        (unsaid, LINKS, "what it sends is known of ddp"),
    ):
        (unknown,), (said,) = forecasts(study, (16,), per_node=8, links=links)
        assert not unknown.prediction.sent and why in said


def test_a_measured_size_sends_between_the_nodes_that_it_was_on(monkeypatch) -> None:
    """And FSDP sends its shard groups as they were recorded: of two the last stays gathered."""
    monkeypatch.setattr(fake_study, "rate", modelled)
    whole_study("s", strategies=("fsdp",), gpus=("1x1", "2x1", "4x1"), repeats=3)
    results = collect("s", write=False)
    runs = results.runs.assign(parameters=1000, shard_groups=2)
    (found,), _ = forecasts(replace(results, runs=runs), (8,), per_node=4, links=LINKS)
    assert found.prediction.sent and found.prediction.nodes[4] == 4
    words = ("all_gather", 2), ("reduce_scatter", 1), ("all_gather", 1), ("reduce_scatter", 1)
    slow = seconds([Message(word, 2000, Scope(4, 4), n) for word, n in words], LINKS)
    assert found.prediction.sent(4) * BATCH / modelled(RunSpec()) == pytest.approx(slow, rel=0.02)


def test_the_speed_up_of_a_forecast_is_over_the_base_of_the_study() -> None:
    rates = {"ddp": {1: [100.0, 101], 2: [196.0, 197], 4: [380.0, 381]}}
    rates["single"] = {1: [125.0, 126]}
    (ddp,), (single,) = forecasts(results_of(rates), (8,))
    assert single == "single: 3 different sizes are needed for a fit (measured: 1)"
    assert ddp.speed_up(8)[0] == pytest.approx(ddp.prediction.rate(8)[0] / 125.5, rel=0.02)
    assert len(ddp.notes) == 1 and "is known to be on several nodes" in ddp.notes[0]
    assert ddp.sizes == {8: None}  # nobody says how many a node has


@pytest.mark.parametrize("strategy", ["ddp", "pp"])
def test_a_planned_size_is_where_it_was_planned_and_a_batch_has_so_many_ranks(strategy) -> None:
    rows = runs_of({"s": {1: [100.0, 101], 2: [196.0, 197], 4: [380.0, 381], 8: [1]}})
    rows = [row | {"strategy": strategy} for row in rows]
    rows[-1] |= {"status": "oom", "reason": "CUDA out of memory", "throughput": None}
    (found,), (why,) = forecasts(results_from(frame(rows, RESULTS)), (8, 1024))
    (line,) = forecast_table(results_of({}), [found]).to_dict("records")
    assert line["nodes"] == 1 and line["node_hours"] == pytest.approx(line["time_s"] / 3600)
    said = "on 8 ranks 1 of 1 runs are not ok (CUDA out of memory): the forecast ignores that"
    assert found.notes == (said,)
    beyond = "s: 1024 ranks share a global batch of 512"
    assert (why == beyond) is (strategy == "ddp")  # a pipeline has several ranks for a sample
    (found,), _ = forecasts(results_from(frame(rows, RESULTS)), (8,), per_node=4)
    assert found.sizes == {8: 2} and "measure one size on two nodes" in found.notes[0]


def test_the_command_takes_links_and_work(modelled_study, tmp_path, monkeypatch, capsys) -> None:
    """Measured links, and the work of a project."""
    # The figures take seconds, and are not what this is about.
    monkeypatch.setattr("jobkit.analysis.figures.draw.draw", lambda *_: [])
    path = tmp_path / "comm.csv"  # two ranks of one node, on a link as FAST
    times = {size: 2 * FAST.latency_s + size * FAST.s_per_byte for size in (1 << 10, 1 << 24)}
    samples = (comm.sample("all_reduce", "all", 2, 1, n, [t], True) for n, t in times.items())
    path.write_text(comm.to_csv(samples))
    words = ["s", "--forecast", "16", "--comm", str(path), "--work", "90 epochs"]
    assert cli.plot_main([*words, "--gpus-per-node", "16"]) == 0
    said = capsys.readouterr().out
    assert "forecast (not measured):" in said and "laws with the measured links, by" in said
    html = (logs() / "s" / "report.html").read_text()
    assert "<h2>A whole project</h2>" in html and "<td>ddp (forecast)</td>" in html
    (logs() / "s" / "forecast.csv").unlink()
    for wrong, text in (
        (["--comm", "absent.csv", "--forecast", "16"], "cannot read absent.csv"),
        (["--forecast", "3"], "measured up to 8"),
        (["--forecast", "9", "--gpus-per-node", "2"], "ddp: measured with 8 ranks on a node"),
        (["--gpus-per-node", "4"], "no effect without --forecast"),
        (["--work", "9 tokens", "--forecast", "16"], "measured images, as '1000 images'"),
    ):
        assert cli.plot_main(["s", *wrong]) == 2
        assert text in capsys.readouterr().err
    assert not (logs() / "s" / "forecast.csv").exists()
