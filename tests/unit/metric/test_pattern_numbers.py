"""Lines of a program's own log: indices that begin again, and texts that are no time or rate."""

import io
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.lines import matches, observed_lines, observed_metrics
from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.steps import Observation, Observed, rate_row
from jobkit.analysis.collect.unused import unused_lines
from jobkit.analysis.log_options import try_pattern
from jobkit.metric.pattern import own_pattern

EPOCHS = r"Epoch: \[(?P<epoch>\d+)\]\[(?P<step>\d+)/\d+\] Time (?P<step_time_s>[\d.]+)"
RATE = r"step (?P<step>\d+) (?P<tokens_per_s>\S+) tok/s"


def observed_of(line: str, log: str, ranks: int | None = 1, **planned: Any) -> Observed:
    pattern = own_pattern({"line": line, "of": "total"})
    found = matches(io.BytesIO(log.encode()), pattern)
    observed = observed_lines(found, pattern, ranks, planned)
    assert observed
    return observed


def of_epochs(first: int, epochs: int = 3) -> str:
    """A log whose index begins again in each epoch; the first epoch takes half as long."""
    lines = [
        f"Epoch: [{epoch}][{step}/200] Time {0.2 if epoch else 0.1}\n"
        for epoch in range(epochs)
        for step in range(first, 200, 10)
    ]
    return "".join(lines)


@pytest.mark.parametrize(("first", "steps"), [(0, 190 + 2 * 191), (10, 180 + 2 * 190)])
def test_all_epochs_count_where_the_index_of_the_step_begins_again(first: int, steps: int) -> None:
    observed = observed_of(EPOCHS, of_epochs(first))
    row = rate_row(observed)
    assert row["steps_timed"] == steps
    of_first = 190 - first
    seconds = 0.1 * of_first + 0.2 * (steps - of_first)
    assert row["throughput"] == pytest.approx(steps / seconds)
    assert unused_lines(RunRecords([]), observed) == ""


def test_the_warm_up_is_the_first_epoch_s_alone() -> None:
    observed = observed_of(EPOCHS, of_epochs(0), warmup_steps=50)
    early = [(o.epoch, o.step) for o in observed.steps if o.warmup]
    assert early == [(0, n) for n in range(0, 51, 10)]


def test_an_index_that_begins_again_without_an_epoch_is_told() -> None:
    line = EPOCHS.replace("(?P<epoch>", "(?:")
    observed = observed_of(line, of_epochs(0))
    assert unused_lines(RunRecords([]), observed).startswith(
        "40 lines of pattern own with the index of an earlier step, more than there are ranks"
    )
    twice = observed_of(line, of_epochs(0, 1) * 2, ranks=2)  # as two ranks print it
    assert twice.repeated == 0 and len(twice.steps) == 20


@pytest.mark.parametrize("bad", [-1, 0, float("nan"), float("inf"), True])
@pytest.mark.parametrize("name", ["tokens_per_s", "step_time_ms"])
def test_a_rate_or_time_that_is_not_above_0_is_no_measurement(name: str, bad: Any) -> None:
    records = [{"step": n, name: 1000.0} for n in range(1, 21)]
    records[9] = {"step": 10, name: bad}
    observed = observed_metrics(records, 1, {})
    assert observed and len(observed.steps) == 19
    assert rate_row(observed)["throughput"] == pytest.approx(1000 if "tok" in name else 1)
    assert "1 [METRIC] line is in no table" in unused_lines(RunRecords(records), observed)


def test_a_time_below_0_is_not_in_the_mean() -> None:
    steps = [Observation(steps=10, time_s=t, rate=5.0) for t in (1.0, -30.0, 3.0)]
    assert rate_row(Observed(steps=steps))["step_time_s"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1,234", 1234.0),
        ("12,345,678.5", 12345678.5),
        ("1_000", 1000.0),
        ("1e3", 1000.0),
        ("1,234,", 1234.0),
        ("12,", 12.0),
        (".5", 0.5),
        ("12.3k", 12300.0),
        ("12.3K", 12300.0),
        ("1.5M", 1.5e6),
        ("2G", 2e9),
        ("0,031", None),
        ("12,5", None),
        ("1,2345", None),
        ("1.234,5", None),
        ("1,00,000", None),
        ("1_00", None),
        ("1k5", None),
        ("k", None),
        ("nan", None),
        ("-3", None),
        ("0.0", None),
        ("1e999", None),
    ],
)
def test_the_text_of_a_rate_is_a_number_or_counted(text: str, rate: float | None) -> None:
    observed = observed_of(RATE, f"step 1 7 tok/s\nstep 2 {text} tok/s\nstep 3 {text} tok/s\n")
    if rate is None:
        said = unused_lines(RunRecords([]), observed)
        why = "with a time or rate that is no number above 0"
        assert (
            said == f"2 lines of pattern own {why}, as tokens_per_s={text}: that value is not used"
        )
        assert rate_row(observed)["throughput"] == 7  # the line of the warm-up, and no other
    else:
        assert rate_row(observed)["throughput"] == pytest.approx(rate)
        assert unused_lines(RunRecords([]), observed) == ""


def test_a_log_of_decimal_commas_has_no_rate_and_says_why() -> None:
    observed = observed_of(r"Zeit (?P<step_time_s>[\d,.]+) s", "Zeit 0,031 s\nZeit 0,032 s\n")
    assert rate_row(observed) == {}
    assert "2 lines of pattern own" in unused_lines(RunRecords([]), observed)
    assert "as step_time_s=0,031: that value is not used" in unused_lines(RunRecords([]), observed)


def test_try_pattern_says_what_it_does_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1 980 tok/s\nstep 2 1.2x tok/s\n")
    assert try_pattern([str(log), "--line", RATE, "--of", "total", "--spans", "step"]) == 0
    said = capsys.readouterr().out
    assert "2 lines found\n  1 line of pattern own with a time or rate that is no number" in said


def test_a_pattern_has_no_default_in_try_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        try_pattern(["--help"])
    assert "default: [METRIC]" not in " ".join(capsys.readouterr().out.split())
