"""Probes of exercises 6.2 to 7.2: trainings and a study as a job runs them, and its report."""

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.exercise.table import Table
from jobkit.paths import logs_root

_NAME = "exercise-"
_SETTINGS = "--breakdown-iterations 0 "
_SETTINGS += "--train-samples 1024 --test-samples 256 --epochs 3 --global-batch-size 64 --lr 0.02"


def _call(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Run a command of jobkit; raise RuntimeError with its last words where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "jobkit", *words], capture_output=True, text=True, env=environ
    )
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise RuntimeError(f"'jobkit {words[0]}' ended with {done.returncode}: {said}")


def _study(name: str, sizes: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run DDP and FSDP at some sizes on this machine, and collect."""
    words = ["run", "--site", "local", "--study", "demo", "--name", name, *_SETTINGS.split()]
    words += ["--start-timeout", "300"]  # a busy machine is slow to import torch
    many = f"{2 * len(sizes)} runs, one after the other"
    print(f"ddp and fsdp at {' and '.join(sizes)} ranks: {many}", file=sys.stderr, flush=True)
    _call([*words, "--strategies", "ddp", "fsdp", "--gpus", *sizes], environ)
    _call(["collect", name], environ)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(row: Mapping[str, str], name: str) -> float | None:
    return float(row[name]) if row.get(name) else None


def _whole(row: Mapping[str, str], name: str) -> int:
    return int(float(row[name]))


def trainings() -> list[Table]:
    """The same training under DDP and FSDP on two ranks, epoch by epoch."""
    with tempfile.TemporaryDirectory(prefix="jobkit-exercise-") as folder:
        environ = {**os.environ, "JOBKIT_LOGS": folder}
        _study(_NAME + "6", ["2"], environ)
        epochs = _rows(Path(folder) / (_NAME + "6") / "epochs.csv")
    columns = ("train_loss", "val_loss", "val_accuracy", "images_per_s", "peak_memory_mib")
    rows: list[tuple[object, ...]] = [
        (row["strategy"], _whole(row, "epoch"), *(_number(row, name) for name in columns))
        for row in epochs
    ]
    head = ("strategy", "epoch", "training loss", "validation loss", "accuracy", "images/s",
            "peak memory (MiB)")  # fmt: skip
    return [Table("the CNN on generated images, two ranks", head, rows)]


def study() -> list[Table]:
    """DDP and FSDP at one and two ranks: the smallest study of scaling."""
    name = f"{_NAME}{time.strftime('%Y%m%d-%H%M%S')}"
    print(f"'python -m jobkit status {name}' follows this study", file=sys.stderr, flush=True)
    _study(name, ["1", "2"], os.environ)
    folder = logs_root() / name
    sizes = {(r["strategy"], r["world_size"]): r for r in _rows(folder / "scaling.csv")}
    columns = ("time_s", "speed_up", "efficiency", "val_loss", "val_accuracy",
               "peak_memory_mib")  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for run in _rows(folder / "results.csv"):
        row = {**run, **sizes.get((run["strategy"], run["world_size"]), {})}
        values = (_number(row, name) for name in columns)
        rows.append((run["strategy"], _whole(run, "world_size"), *values))
    head = ("strategy", "ranks", "s per epoch", "speed-up", "efficiency", "validation loss",
            "accuracy", "peak memory (MiB)")  # fmt: skip
    return [Table(f"study {name}", head, rows)]


def sentences() -> list[Table]:
    """Plot the newest study of exercise 7.1; the sentences of its report."""
    found = sorted(logs_root().glob(_NAME + "*/plan.json"))
    if not found:
        raise UsageError("there is no study yet: run 'python -m jobkit exercise 7.1' first")
    folder = found[-1].parent
    _call(["plot", str(folder)])
    from jobkit.analysis.collect.results import collect
    from jobkit.analysis.figures.style import unit
    from jobkit.analysis.findings.verdict import verdict

    results = collect(folder, write=False)
    figures = sorted(path.name for path in (folder / "figures").glob("*.png"))
    lines = [(line,) for line in verdict(results, unit(results))]
    return [
        Table(f"{folder}/report.html says", ("sentence",), lines),
        Table(f"figures in {folder}/figures", ("figure",), [(name,) for name in figures]),
    ]
