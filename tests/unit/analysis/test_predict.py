"""Predictions beyond the measured sizes: nothing impossible, and intervals that hold."""

import numpy as np
import pytest

from jobkit.analysis.scaling.predict import WIDEST, predict
from jobkit.errors import UsageError

SUPERLINEAR = ([1000, 2060, 4280], [1000, 2080, 4220], [1000, 2010, 4400], [1000, 2200, 4900])
LOSING = ([1000, 900, 800], [1000, 1900, 1500], [1000, 1000, 1000])


@pytest.mark.parametrize("rates", [*SUPERLINEAR, *LOSING], ids=str)
@pytest.mark.parametrize("ranks", [8, 16, 64, 1024, 100_000])
def test_no_forecast_is_negative_above_ideal_or_upside_down(rates, ranks: int) -> None:
    """The fitted laws gave -189 [-0.39, -91,300] for the first of them, and an OverflowError."""
    found = predict([1, 2, 4], rates)
    value, low, high = found.speed_up(ranks)
    assert 0 < low <= value <= high
    gained = max(1.0, rates[1] / 2000, rates[2] / 4000)
    assert value <= 1.02 * gained * ranks
    assert high <= 1.2 * gained * ranks  # ideal and the noise of a run
    assert 0 < found.interval(ranks)[0] <= found.rate(ranks) <= found.interval(ranks)[1]


def test_it_widens_with_the_distance_until_it_is_refused() -> None:
    weak = predict([1, 2, 4], [300, 587, 1172])  # a rate per rank that falls by 2 %
    widths = [np.divide(*weak.interval(n)[::-1]) for n in (8, 16, 32, 64, 1024)]
    assert widths == sorted(widths)
    assert weak.refused(8) == ""
    assert "the 95 % interval of a forecast to 1024 ranks spans a factor of" in weak.refused(1024)
    assert widths[0] < WIDEST < widths[-1]


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
    for _ in range(40):
        noise = 1 + 0.03 * generator.standard_normal(len(sizes))
        found = predict(sizes, sizes / (1 + 0.05 * np.log2(sizes)) * noise)
        low, high = found.interval(64)
        held += low <= 64 / 1.3 <= high
    assert held >= 36


def test_two_sizes_are_refused_and_the_same_runs_give_the_same_forecast() -> None:
    with pytest.raises(UsageError, match="3 different sizes are needed, and 2 measured"):
        predict([1, 1, 2], [1.0, 1.0, 2.0])
    one, other = (predict([1, 2, 4], [10.0, 19.0, 36.0]).interval(8) for _ in range(2))
    assert one == other
