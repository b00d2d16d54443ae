"""Predictions beyond the measured sizes: nothing impossible, and intervals that hold."""

import numpy as np
import pytest

from jobkit.analysis.scaling.predict import WIDEST, Prediction, predict
from jobkit.errors import UsageError

SUPERLINEAR = ([1000, 2060, 4280], [1000, 2080, 4220], [1000, 2010, 4400], [1000, 2200, 4900])
LOSING = ([1000, 900, 800], [1000, 1900, 1500], [1000, 1000, 1000])


@pytest.mark.parametrize("rates", [*SUPERLINEAR, *LOSING], ids=str)
def test_no_forecast_is_negative_above_ideal_or_upside_down(rates) -> None:
    """The fitted laws gave -189 [-0.39, -91,300] for the first of them, and an OverflowError."""
    found = predict([1, 2, 4], rates)
    gained = max(1.0, rates[1] / 2000, rates[2] / 4000)
    for ranks in (8, 16, 64, 1024, 100_000):
        value, low, high = found.speed_up(ranks)
        assert 0 < low <= value <= high
        assert value <= 1.02 * gained * ranks
        assert high <= 1.2 * gained * ranks  # ideal and the noise of a run
        assert 0 < found.interval(ranks)[0] <= found.rate(ranks) <= found.interval(ranks)[1]


ODD = {
    "sizes not powers of two": ([1, 3, 6, 12], [100.0, 290, 560, 1050]),
    "sizes from 6 on": ([6, 7, 9], [600.0, 690, 880]),
    "a huge noise": ([1, 2, 4, 8] * 2, [100.0, 900, 30, 5000, 7, 20, 3000, 10]),
    "a rate of almost nothing": ([1, 2, 4], [1e-300, 1e-300, 1e-300]),
    "a rate beyond all": ([1, 2, 4], [1e300, 1e300, 1e300]),
    "super-linear by far": ([1, 2, 4], [100.0, 1000, 10_000]),
    "the same to the last digit": ([1, 2, 4, 8], [100.0, 200, 400, 800]),
}


@pytest.mark.parametrize("per_node", [None, 1, 4])
@pytest.mark.parametrize("name", ODD)
def test_odd_curves_have_a_forecast_in_order_or_a_reason(name: str, per_node) -> None:
    sizes, rates = ODD[name]
    found = predict(sizes, rates, per_node)
    for ranks in (max(sizes) + 1, 4 * max(sizes), 100 * max(sizes)):
        value, low, high = found.speed_up(ranks)
        assert 0 < low <= value <= high < np.inf
        assert 0 < found.interval(ranks)[0] <= found.rate(ranks) <= found.interval(ranks)[1]
        widest = max(high / low, np.divide(*found.interval(ranks)[::-1]))
        assert bool(found.refused(ranks)) == (widest > WIDEST)


@pytest.mark.parametrize("rate", [0.0, -1.0, np.nan, np.inf])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="no number above 0"):
        predict([1, 2, 4], [100.0, 200, rate])


def test_the_cost_of_a_node_boundary_is_held() -> None:
    """Eight ranks a node, and a second node that costs 40 %: no size on one node shows it."""
    sizes, within = [1, 2, 4, 8], [100.0, 196, 388, 768]
    blind, told = predict(sizes, within), predict(sizes, within, per_node=8)
    assert told.rate(16) < blind.rate(16)
    assert told.interval(16)[0] < 768 * 2 / 1.4 < told.interval(16)[1]
    # Seen once, it is known: two nodes that cost 40 %, and four as much again as a ring over them.
    seen = predict([*sizes, 16], [*within, 768 * 2 / 1.4], per_node=8)
    assert seen.interval(32)[0] < 768 * 4 / 1.6 < seen.interval(32)[1]
    assert np.divide(*seen.interval(32)) > np.divide(*told.interval(32))  # low / high: narrower
    spread_out = predict([2, 4, 8], [196.0, 388, 768], 8, {2: 2, 4: 4, 8: 8})
    assert spread_out.places.crossed
    assert spread_out.interval(16)[0] < 1500 < spread_out.interval(16)[1]


def test_a_jump_above_ideal_stays_as_when_the_data_fit_the_caches() -> None:
    noise = np.random.default_rng(5).normal(0, 0.01, (4, 3))
    rates = [
        (1.0, 1.0, 1.3, 1.3)[i] * 1000 * 2**i * np.exp(noise[i, k])
        for i in range(4)
        for k in range(3)
    ]
    found = predict(np.repeat([1, 2, 4, 8], 3).tolist(), rates)
    for ranks in (16, 32):
        low, high = found.interval(ranks)
        assert low < 1300 * ranks < high < 1.5 * 1300 * ranks
    # By chance alone there is none: the largest size is 1 % above, and a run is 1 % off.
    calm = predict([1, 2, 4, 1, 2, 4], [1000, 2000, 4040, 1010, 2020, 4080])
    assert calm.speed_up(8)[0] <= 8


def test_repeats_that_differ_much_widen_the_interval_above_ideal_too() -> None:
    factors = [1.3, 0.8, 1.0, 0.7, 1.4, 1.1, 1.0, 0.75, 1.3]
    rates = [1000 * 2 ** (i // 3) * factor for i, factor in enumerate(factors)]
    low, high = predict([1] * 3 + [2] * 3 + [4] * 3, rates).interval(8)
    assert high > 1.3 * 8000
    assert low < 8000 / 1.3


def test_it_widens_with_the_distance_until_it_is_refused() -> None:
    weak = predict([1, 2, 4], [300, 587, 1172])  # a rate per rank that falls by 2 %
    widths = [np.divide(*weak.interval(n)[::-1]) for n in (8, 16, 32, 64, 1024)]
    assert widths == sorted(widths)
    assert weak.refused(8) == ""
    assert "the 95 % interval of a forecast to 1024 ranks spans a factor of" in weak.refused(1024)
    assert widths[0] < WIDEST < widths[-1]


@pytest.mark.parametrize(("rate", "speed_up"), [((1, 2), (1, 5)), ((1, 5), (1, 2))])
def test_the_widest_of_the_intervals_that_are_shown_is_judged(
    rate: tuple[float, float], speed_up: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = predict([1, 2, 4], [300, 587, 1172])
    monkeypatch.setattr(Prediction, "interval", lambda *_: rate)
    monkeypatch.setattr(Prediction, "speed_up", lambda *_: (1.0, *speed_up))
    which = "the rate" if rate[1] == 5 else "the speed-up"
    assert f"spans a factor of 5.0 for {which} (at most 4)" in sound.refused(8)


def test_good_scaling_is_not_called_bad_for_a_term_within_the_noise() -> None:
    """The sign of a noise term gave a speed-up of 15.3 on 64 ranks for a truth of 48.7."""
    generator = np.random.default_rng(3)
    sizes = np.repeat([1, 2, 4, 8], 3)
    for _ in range(10):
        noise = 1 + 0.03 * generator.standard_normal(len(sizes))
        value, low, high = predict(sizes, sizes / (1 + 0.005 * (sizes - 1)) * noise).speed_up(32)
        assert 20 < value <= 32
        assert low < 27.7 < high


def test_a_loss_at_each_doubling_is_held() -> None:
    """Weak scaling that loses by log2 N was held in 39 of 100."""
    generator = np.random.default_rng(4)
    sizes, held = np.repeat([1, 2, 4, 8, 16], 3), 0
    for _ in range(25):
        noise = 1 + 0.03 * generator.standard_normal(len(sizes))
        found = predict(sizes, sizes / (1 + 0.05 * np.log2(sizes)) * noise)
        low, high = found.interval(64)
        held += low <= 64 / 1.3 <= high
    assert held >= 22


def test_two_sizes_are_refused_and_the_same_runs_give_the_same_forecast() -> None:
    with pytest.raises(UsageError, match="3 different sizes are needed, and 2 measured"):
        predict([1, 1, 2], [1.0, 1.0, 2.0])
    one, other = (predict([1, 2, 4], [10.0, 19.0, 36.0]).interval(8) for _ in range(2))
    assert one == other
