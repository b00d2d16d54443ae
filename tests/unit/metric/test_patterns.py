"""Patterns: the shipped ones on lines of their programs, and every way to write a bad one."""

import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.lines import matches, observed_lines, observed_metrics
from jobkit.analysis.collect.records import RunRecords, read_log
from jobkit.analysis.collect.rows import unused_lines
from jobkit.analysis.collect.steps import Observed, rate_row, step_rows
from jobkit.errors import UsageError
from jobkit.metric.pattern import PATTERNS, Pattern, load_pattern, quantity_of

EPOCHS = r"Epoch: \[(?P<epoch>\d+)\]\[(?P<step>\d+)/\d+\] Time (?P<step_time_s>[\d.]+)"
TOTAL = {"of": "total", "spans": "interval"}
RATE = r"step (?P<step>\d+) (?P<tokens_per_s>\S+) tok/s"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pattern_with(**keys: Any) -> Pattern:
    Path("own.toml").write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()))
    return load_pattern("own.toml")


def observed_in(log: str, pattern: Pattern, ranks: int | None, planned: Any) -> Observed:
    found = matches(io.BytesIO(log.encode()), pattern)
    observed = observed_lines(found, pattern, ranks, planned)
    assert observed
    return observed


def observed_of(line: str, log: str, ranks: int | None = 1, **planned: Any) -> Observed:
    return observed_in(log, pattern_with(line=line, **TOTAL), ranks, planned)


def unused(observed: Observed, *records: Any) -> str:
    return unused_lines(RunRecords(list(records)), observed)


def test_each_shipped_pattern_says_where_its_lines_come_from() -> None:
    for name in sorted(p.stem for p in PATTERNS.glob("*.toml")):
        pattern = load_pattern(name)
        assert pattern.program and pattern.contains
        assert "\n# https://github.com/" in (PATTERNS / f"{name}.toml").read_text()
        found = matches(io.BytesIO(pattern.sample.encode()), pattern)
        assert sum(bool(groups) for _, groups in found) == len(pattern.sample.splitlines()), name


def test_the_columns_of_a_shipped_pattern() -> None:
    for name, ranks, planned, column, value in [
        ("nanogpt", 2, {}, "step_time_s", (0.13521 + 0.13487) / 2),
        ("nanogpt", 2, {"unit": "tokens", "work_per_step": 1000.0}, "tokens/s",
         2000 / (0.13521 + 0.13487)),
        # Of one device. Its lines after the first are of ten steps or nine: the harmonic mean.
        ("torchtitan", 8, {}, "tokens/s", 8 * 19 / (9 / 6123 + 10 / 6125)),
        ("torchtitan", 8, {}, "peak_memory_mib", 40.12 * 1024),
        # The rate of the last step alone; the first line is of the warm-up.
        ("deepspeed", 2, {}, "samples/s", 124.8),
        ("timm", 2, {}, "data_wait_share", 0.021 / 0.691),
        # A running rate: the last line counts.
        ("transformers", 2, {}, "samples/s", 240.2),
    ]:  # fmt: skip
        pattern = load_pattern(name)
        observed = observed_in(pattern.sample, pattern, ranks, planned)
        row = rate_row(observed)
        if column.endswith("/s"):
            assert row["throughput_unit"] == column
            column = "throughput"
        assert row[column] == pytest.approx(value)


def test_a_slow_step_is_in_the_mean_and_is_said() -> None:
    pattern = load_pattern("timm")
    lines = pattern.sample.strip().splitlines()
    slow = lines[2].replace("100/1251", "150/1251").replace("739.88", "73.988")  # a checkpoint
    slow = slow.replace("0.346s,", "3.46s,")
    observed = observed_in("\n".join([*lines, slow, ""]), pattern, 2, {})
    assert rate_row(observed)["throughput"] == pytest.approx(3 / (1 / 742.03 + 11 / 739.88))
    assert re.search(r"1 line of pattern timm with a step of over 5 times", unused(observed))


def test_a_rate_keeps_the_unit_that_its_line_states() -> None:
    number, tokens = "(?P<{}>[0-9.]+)", {"unit": "tokens", "work_per_step": 10}
    for groups, log, planned, rate in [
        ("samples_per_s", "12", tokens, (12, "samples/s")),
        ("samples_per_s", "12", {"unit": "tokens"}, (12, "samples/s")),
        ("samples_per_s step_time_s", "12 0.5", tokens, (20, "tokens/s")),
        ("samples_per_s tokens_per_s", "12 900", {"unit": "tokens"}, (900, "tokens/s")),
        ("samples_per_s tokens_per_s", "12 900", {}, (12, "samples/s")),
        ("steps_per_s", "3", tokens, (30, "tokens/s")),
        ("steps_per_s", "3", {"work_per_step": 10}, (30, "units/s")),
    ]:
        line = " ".join(map(number.format, groups.split()))
        row = rate_row(observed_of(line, f"{log}\n{log}\n", **planned))
        assert (row["throughput"], row["throughput_unit"]) == (pytest.approx(rate[0]), rate[1])


def test_a_name_says_its_quantity() -> None:
    for name, expected in {
        "step_time_ms": ("step_time", 1e-3, "", False),
        "tokens_per_s_per_gpu": ("rate", 1, "tokens", True),
        "samples_per_min": ("rate", 1 / 60, "samples", False),
        "tokens_per_step": ("work", 1, "tokens", False),
        "peak_memory_gib": ("memory", 1024, "", False),
        "data_time_s": ("data_wait", 1, "", False),
        "tps": ("free", 1, "", False),
        "step_time": ("free", 1, "", False),
    }.items():
        found = quantity_of(name)
        assert (found.kind, found.scale, found.unit, found.per_rank) == expected


def test_a_bad_pattern_is_one_line() -> None:
    for table, says in [
        ({}, "no regular expression"),
        ({"line": "step ("}, "does not compile"),
        ({"line": "step [0-9]+"}, "no named group"),
        ({"line": "(?P<step>[0-9]+)"}, "no group says a time or a rate"),
        ({"line": "(?P<tokens_per_s>[0-9]+)"}, "of all ranks or of one"),
        ({"line": "(?P<step_time_s>[0-9]+)", "spans": "step", "of": "each"}, "unknown of"),
        ({"line": "(?P<step_time_s>[0-9]+)"}, r"Add spans = 'step' \(one step\), 'interval'"),
        ({"line": 3}, "must be a string"),
    ]:
        with pytest.raises(UsageError, match=rf"own\.toml: .*{says}"):
            pattern_with(**table)


def test_a_restart_is_a_warm_up_again() -> None:
    log = "[jobkit] start: attempt 0 of x\nstep 1 9 s\nstep 2 1 s\nstep 3 1 s\n"
    log += "[jobkit] start: attempt 1 of x\nstep 3 9 s\nstep 4 1 s\n"
    log += "step 5 1"  # of a line without its end no number is taken
    observed = observed_of("step (?P<step>[0-9]+) (?P<step_time_s>[0-9.]+)", log)
    assert rate_row(observed)["step_time_s"] == 1.0
    rows = [(r["attempt"], r["step"]) for r in step_rows(observed) if not r["warmup"]]
    assert rows == [(0, 2), (0, 3), (1, 4)]


def of_epochs(first: int, epochs: int = 3) -> str:
    """A log whose index begins again in each epoch; the first epoch takes half as long."""
    places = itertools.product(range(epochs), range(first, 200, 10))
    return "".join(f"Epoch: [{e}][{s}/200] Time {0.2 if e else 0.1}\n" for e, s in places)


@pytest.mark.parametrize(("first", "steps"), [(0, 190 + 2 * 191), (10, 180 + 2 * 190)])
def test_all_epochs_count_where_the_index_of_the_step_begins_again(first: int, steps: int) -> None:
    observed = observed_of(EPOCHS, of_epochs(first))
    row = rate_row(observed)
    assert sum(o.steps or 1 for o in observed.steps if not o.warmup) == steps
    early = observed_of(EPOCHS, of_epochs(first), warmup_steps=50).steps
    steps_of_first = [(o.epoch, o.step) for o in early if o.warmup]
    assert steps_of_first == [(0, n) for n in range(first, first + 51, 10)]
    of_first = 190 - first
    seconds = 0.1 * of_first + 0.2 * (steps - of_first)
    assert row["throughput"] == pytest.approx(steps / seconds)
    assert unused(observed) == ""


def test_an_index_that_begins_again_without_an_epoch_is_told() -> None:
    line = EPOCHS.replace("(?P<epoch>", "(?:")
    observed = observed_of(line, of_epochs(0))
    assert unused(observed).startswith("40 lines of pattern own with the index of an earlier step")
    twice = observed_of(line, of_epochs(0, 1) * 2, ranks=2)  # as two ranks print it
    assert unused(twice) == "" and len(twice.steps) == 20


STEP = r"step (?P<step>\d+) (?P<step_time_s>[\d.]+) s|epoch (?P<epoch>\d+)|(?P<val_loss>v)"


def steps(*numbers: int, text: str = "step {} 1 s\n") -> str:
    return "".join(map(text.format, numbers))


def test_lines_of_other_ranks_and_after_a_restart_are_read() -> None:
    for log, ranks, used in (
        (steps(*range(1, 41), *range(31, 61)), 1, 60),  # after a restart
        ("".join(steps(*range(n, n + 100)) * 2 for n in range(1, 1000, 100)), 2, 1000),
        ("".join(steps(n) * 7 + steps(max(1, n - 5)) for n in range(1, 51)), 8, 50),
        ("".join(f"epoch {n}\n" + steps(*range(n * 9, n * 9 + 9)) for n in range(4)), 1, 36),
    ):
        assert len(observed_of(STEP, log, ranks=ranks).steps) == used


def test_foreign_lines_after_a_restart_are_of_the_next_attempt(tmp_path: Path) -> None:
    log, text = tmp_path / "train.log", "[METRIC] step={} step_time_s=%s\n"
    one, two = steps(1, 2, 3, text=text % 9), steps(*range(1, 21), text=text % 1)
    long = '[METRIC] {"step":21,"step_time_s":1' + "0" * 400 + "}\n"
    start = "[jobkit] start: attempt {} of x\n"
    log.write_text(start.format(0) + one + start.format(1) + two + long)
    observed = observed_metrics(read_log(log).records, 1, {})
    assert observed and [o.attempt for o in observed.steps] == [0] * 3 + [1] * 20


@pytest.mark.parametrize("name", ["tokens_per_s", "step_time_ms"])
def test_a_rate_or_time_that_is_not_above_0_is_no_measurement(name: str) -> None:
    for bad in (-1, 0, float("nan"), float("inf"), True):
        records = [{"step": n, name: 1000.0} for n in range(1, 21)]
        records[9] = {"step": 10, name: bad}
        observed = observed_metrics(records, 1, {})
        assert observed and len(observed.steps) == 19
        assert rate_row(observed)["throughput"] == pytest.approx(1000 if "tok" in name else 1)
        assert "1 [METRIC] line is in no table" in unused(observed, *records)


def test_the_text_of_a_rate_is_a_number_or_counted() -> None:
    for text, rate in [
        *[("1,234", 1234), ("12,345,678.5", 12345678.5), ("1_000", 1000), ("1e3", 1000)],
        *[("1,234,", 1234), ("12,", 12), (".5", 0.5), ("12.3k", 12300), ("12.3K", 12300)],
        *[("1.5M", 1.5e6), ("2G", 2e9), ("np.float32(1.25)", 1.25)],
        *[(text, None) for text in ("0,031", "12,5", "1,2345", "1.234,5", "1,00,000", "1_00")],
        *[(text, None) for text in ("1k5", "k", "nan", "-3", "0.0", "1e999")],
    ]:
        observed = observed_of(RATE, f"step 1 7 tok/s\nstep 2 {text} tok/s\nstep 3 {text} tok/s\n")
        if rate is None:
            said = "2 lines of pattern own with a time or rate that is no number above 0, "
            assert unused(observed) == f"{said}as tokens_per_s={text}: that value is not used"
            assert rate_row(observed)["throughput"] == 7  # the line of the warm-up, and no other
        else:
            assert rate_row(observed)["throughput"] == pytest.approx(rate)
            assert unused(observed) == ""
