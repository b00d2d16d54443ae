"""Logs of other programs as files get them: whatever happens to a log, no wrong number is silent.

Each log is made from a known time of a step. Read, it gives that within 5 %, or no rate and why, or
a rate with a sentence beside it.
"""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit.analysis.collect.logs import GivenLogs
from jobkit.analysis.collect.results import collect
from jobkit.metric.pattern import load_pattern

RANKS, STEPS, EVERY, SECONDS = 4, 120, 10, 0.25
WORK = 64  # samples, images or tokens of a step, over all ranks
Line = Callable[[int, float, random.Random], str]


def bar(step: int, seconds: float) -> str:
    """What tqdm says of a speed: steps a second, or seconds a step."""
    rate = f"{1 / seconds:.2f}it/s" if seconds < 1 else f"{seconds:.2f}s/it"
    part = step % 60 or 60
    return f"Epoch {(step - 1) // 60}: {part * 100 // 60:3}%|####| {part}/60 [00:10<00:30, {rate}]"


def transformers(step: int, seconds: float, _: random.Random) -> str:
    at = f"'epoch': {step / 60}}}"
    log = f"{{'loss': 4.3, 'grad_norm': 0.6, 'learning_rate': 4e-05, {at}"
    rate = f"'train_samples_per_second': {WORK / seconds:.2f}, 'train_steps_per_second': 7.5"
    end = f"\n{{'train_runtime': 9.9, {rate}, 'train_loss': 4.1, {at}"
    return log + (end if step >= STEPS else "")


PROGRAMS: dict[str, tuple[str, Line]] = {
    "nanogpt": ("steps/s", lambda n, s, r: f"iter {n}: loss 3.1, time {1e3 * s:.2f}ms, mfu 9.00%"),
    "torchtitan": (
        "tokens/s",
        lambda n, s, r: (
            f"[rank0]:[titan] - root - INFO - step: {n:2}  loss:  7.1  memory: "
            f"38.02GiB(48.01%)  tps: {250 * WORK / s / RANKS:,.0f}  tflops: 312.45  mfu: 31.59%"
        ),
    ),
    "timm": (
        "images/s",
        lambda n, s, r: (
            f"Train: {(n - 1) // 60} [{(n - 1) % 60:4}/60 (  0%)]  Loss: 6.9 (6.9)  "
            f"Time: {s:.3f}s, {WORK / s:7.2f}/s  ({s:.3f}s, 1.00/s)  LR: 1.0e-05  Data: 0.011 (0)"
        ),
    ),
    "transformers": ("samples/s", transformers),
    "lightning": ("steps/s", lambda n, s, r: bar(n, s)),
    "": ("samples/s", lambda n, s, r: f"[METRIC] step={n} samples_per_s={WORK / s:.3f} loss=3.1"),
}
AMOUNT = {"steps/s": 1, "tokens/s": 250 * WORK, "samples/s": WORK, "images/s": WORK}


def training(line: Line, seconds: float, r: random.Random) -> str:
    """The lines of a training; the first step takes long, and each speed varies by 2 %."""
    lines = ["starting", line(1, 5 * seconds, r)]
    for step in range(EVERY, STEPS + 1, EVERY):
        lines.append(line(step, seconds * r.gauss(1, 0.02), r))
    return "\n".join([*lines, "done", ""])


def of_ranks(log: str, r: random.Random) -> str:
    """Every rank prints each line, a rank may be a line ahead, and their clocks differ."""
    lines = [f"{text}\n" for text in log.splitlines() for _ in range(RANKS)]
    for place in range(0, len(lines) - RANKS, 3):
        if r.random() < 0.3:
            lines[place], lines[place + RANKS - 1] = lines[place + RANKS - 1], lines[place]
    return "".join(re.sub(r"(?<=\.\d\d)(?=ms|it/s| loss)", str(r.randrange(9)), t) for t in lines)


def prefixed(log: str, prefix: str) -> str:
    return "".join(f"{prefix}{text}\n" for text in log.splitlines())


MANGLED: dict[str, Callable[[str, Line, random.Random], str]] = {
    "clean": lambda log, line, r: log,
    "CRLF": lambda log, line, r: log.replace("\n", "\r\n"),
    "ANSI": lambda log, line, r: prefixed(log, "\x1b[32m").replace("\n", "\x1b[0m\n"),
    "srun -l": lambda log, line, r: prefixed(log, "0: "),
    "kubernetes": lambda log, line, r: prefixed(log, "2026-01-01T12:00:00.123456789Z stdout F "),
    "each line twice": lambda log, line, r: "".join(2 * f"{t}\n" for t in log.splitlines()),
    "a copy appended": lambda log, line, r: log + log,
    "all ranks print": lambda log, line, r: of_ranks(log, r),
    "wrapped": lambda log, line, r: re.sub(r"(.{80})", r"\1\n", log),
    "decimal commas": lambda log, line, r: re.sub(r"(?<=\d)\.(?=\d)", ",", log),
    "cut": lambda log, line, r: log[: int(len(log) * r.uniform(0.4, 0.9))],
    "again at half the speed": lambda log, line, r: (
        log[: int(len(log) * 0.7)].rsplit("\n", 1)[0] + "\n" + training(line, 2 * SECONDS, r)
    ),
    "goes on at half the speed": lambda log, line, r: (
        log + "\n".join(line(n, 2 * SECONDS, r) for n in range(STEPS // 2, 2 * STEPS, EVERY)) + "\n"
    ),
    "a slower training": lambda log, line, r: log + training(line, 3 * SECONDS, r),
    "below a step a second": lambda log, line, r: training(line, 12 * SECONDS, r),
}
TRUE = {"below a step a second": 12.0}


# Each way on three of the programs, and each program in six of the ways.
PAIRS = [(name, how) for n, how in enumerate(MANGLED) for m, name in enumerate(PROGRAMS)
         if (n + m) % 3 == 0 or how in ("decimal commas", "a slower training")]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_no_number_is_wrong_in_silence(name: str, how: str, tmp_path: Path) -> None:
    unit, line = PROGRAMS[name]
    pattern = load_pattern(name) if name else None
    files = []
    for seed in range(3):
        r = random.Random(f"{name} {how} {seed}")
        files.append(tmp_path / f"{seed}-ranks={RANKS}.log")
        files[-1].write_bytes(MANGLED[how](training(line, SECONDS, r), line, r).encode())
    given = GivenLogs(files=tuple(files), size=r"ranks=(?P<ranks>\d+)", pattern=pattern)
    results = collect(tmp_path, write=False, logs=given)
    true = AMOUNT[unit] / (SECONDS * TRUE.get(how, 1))
    for row in results.runs.to_dict("records"):
        right = row["status"] == "ok" and abs(row["throughput"] / true - 1) < 0.05
        assert right or isinstance(row["problems"], str) or row["status"] == "failed", row
        assert row["reason"], row
        if how in ("clean", "CRLF", "ANSI", "srun -l", "kubernetes"):
            assert right and row["throughput_unit"] == unit
