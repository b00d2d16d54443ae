"""The learning rate of each step."""

import math

import pytest

from jobkit.payload.train import learning_rate, peak_lr, total_steps
from jobkit.spec.runspec import RunSpec


def course(spec: RunSpec, steps_per_epoch: int) -> list[float]:
    peak, steps = peak_lr(spec), spec.epochs * steps_per_epoch
    return [learning_rate(spec, i, steps_per_epoch, peak) for i in range(steps)]


def test_onecycle_rises_for_a_quarter_and_falls_to_nearly_nothing() -> None:
    rates = course(RunSpec(lr=1.0, epochs=4), 10)
    assert rates.index(max(rates)) == 10 and max(rates) == 1.0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[0], rates[-1]) == (pytest.approx(1 / 11), pytest.approx(1 / 30))


def test_the_speed_run_rises_from_a_fifth_and_falls_to_7_percent() -> None:
    rates = course(RunSpec(lr=2.0, epochs=100, speed_run=True), 1)
    assert rates[:24] == pytest.approx([0.4 + 1.6 * i / 23 for i in range(24)])
    assert rates[23:] == pytest.approx([0.14 + 1.86 * (77 - i) / 77 for i in range(77)])


def test_the_other_courses() -> None:
    rates = course(RunSpec(lr=2.0, epochs=2, lr_schedule="cosine"), 4)
    assert rates == pytest.approx([1 + math.cos(math.pi * i / 8) for i in range(8)])
    assert set(course(RunSpec(lr=0.3, epochs=2, lr_schedule="constant"), 5)) == {0.3}
    for kind in ("onecycle", "cosine", "constant"):  # of very few steps, too
        for epochs in (1, 2):
            rates = course(RunSpec(lr=1.0, epochs=epochs, lr_schedule=kind), 1)
            assert all(0 < rate <= 1 for rate in rates)


def test_the_rate_is_scaled_by_the_global_batch() -> None:
    for rule, factor in {"none": 1.0, "linear": 4.0, "sqrt": 2.0}.items():
        spec = RunSpec(lr=0.1, batch_size_per_rank=256, ranks_per_node=4, lr_scaling=rule)
        assert peak_lr(spec) == pytest.approx(0.1 * factor)


def test_the_rates_end_with_the_steps_of_a_shorter_run() -> None:
    short = RunSpec(lr=1.0, epochs=10, max_steps=8)
    assert course(short, 4)[:8] == pytest.approx(course(RunSpec(lr=1.0, epochs=2), 4))
    assert total_steps(RunSpec(epochs=2, max_steps=9), 4) == 8
