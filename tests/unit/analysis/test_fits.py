"""The laws of scaling: a made-up truth is found again, and the intervals hold it."""

import numpy as np
import pytest

from jobkit.analysis.scaling.fits import best, fit
from jobkit.errors import UsageError

SIZES = (1, 2, 4, 8, 16)


def amdahl(n, s=0.05):
    return 100 * n / (1 + s * (n - 1))


def usl(n, a=0.03, b=0.002):
    return 100 * n / (1 + a * (n - 1) + b * n * (n - 1))


def gustafson(n, s=0.08):
    return 100 * (n - s * (n - 1))


LAWS = {"amdahl": (amdahl, [0.05]), "usl": (usl, [0.03, 0.002]), "gustafson": (gustafson, [0.08])}


def noisy(law, generator, repeats: int = 3, noise: float = 0.02, sizes=SIZES):
    n = np.repeat(sizes, repeats)
    return n, law(n) * (1 + noise * generator.standard_normal(len(n)))


@pytest.mark.parametrize("name", LAWS)
def test_the_truth_is_found_where_there_is_no_noise(name: str) -> None:
    law, truth = LAWS[name]
    found = fit(name, SIZES, [law(n) for n in SIZES])
    assert [e.value for e in found.estimates] == pytest.approx(truth)
    assert found.rate_one == pytest.approx(100)
    assert found.r_squared == pytest.approx(1)
    assert found.worst == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", LAWS)
def test_the_intervals_hold_the_truth_in_nine_of_ten_of_200_trials(name: str) -> None:
    law, truth = LAWS[name]
    generator = np.random.default_rng(7)
    held = np.zeros(len(truth))
    for _ in range(200):
        found = fit(name, *noisy(law, generator))
        held += [e.low <= t <= e.high for e, t in zip(found.estimates, truth, strict=True)]
    assert held.min() >= 180
    assert held.max() < 200  # an interval that always holds says nothing


@pytest.mark.parametrize(("law", "least"), [("amdahl", 3), ("usl", 4), ("gustafson", 3)])
def test_too_few_sizes_are_refused_however_many_runs(law: str, least: int) -> None:
    few = list(SIZES[: least - 1]) * 9
    with pytest.raises(UsageError, match=f"{law}: {least} different sizes are needed"):
        fit(law, few, [amdahl(n) for n in few])
    enough = list(SIZES[:least])
    assert fit(law, enough, [amdahl(n) for n in enough]).sizes == SIZES[:least]


def test_the_goodness_tells_a_law_that_does_not_fit() -> None:
    rates = [usl(n, a=0.01, b=0.02) for n in SIZES]
    assert fit("amdahl", SIZES, rates).worst > 0.1
    assert fit("usl", SIZES, rates).worst < 0.001
    assert fit("amdahl", SIZES, rates).r_squared < fit("usl", SIZES, rates).r_squared


def test_laws_whose_unknowns_are_losses_come_first() -> None:
    assert best("strong", SIZES, [usl(n) for n in SIZES])[0].law == "usl"
    superlinear = [usl(n, a=0.05, b=-0.002) for n in SIZES]
    assert best("strong", SIZES, superlinear)[0].law == "amdahl"
    assert best("strong", SIZES[:3], [amdahl(n) for n in SIZES[:3]])[0].law == "amdahl"
    assert best("weak", SIZES, [gustafson(n) for n in SIZES])[0].law == "gustafson"
    assert best("strong", [1], [100.0]) == []
