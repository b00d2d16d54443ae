"""The line under a figure's title: the device and the settings of the measurement."""

import textwrap

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.findings.sources import rate_sources

_WIDTH = 86  # characters: what the narrowest figure has room for


def subtitle(results: Results, spread: str = "median and range", shown: str = "") -> str:
    """What all runs share: device, model, data, precision, batch.

    spread: what is drawn of repeats. shown: what is drawn in place of it.
    """
    texts = shared_settings(results, spread, shown)
    return "\n".join(textwrap.fill(text, _WIDTH) for text in texts)


def shared_settings(results: Results, spread: str, shown: str = "") -> list[str]:
    """The same as at most two lines of any length."""
    runs = results.runs
    lines = ([_devices(runs), *_settings(runs)], [_batch(runs), shown or _repeats(runs, spread)])
    texts = (" | ".join(part for part in line if part) for line in lines)
    return [text for text in texts if text]


def _one(runs: pd.DataFrame, name: str) -> str:
    """The value that all runs share; empty where they differ or it is not known."""
    values = runs[name].dropna().unique()
    return f"{values[0]:,}" if len(values) == 1 else ""


def _devices(runs: pd.DataFrame) -> str:
    names = list(runs["device"].dropna().unique())
    return " and ".join(names) if len(names) <= 2 else f"{len(names)} device types"


def _settings(runs: pd.DataFrame) -> list[str]:
    model, precision = _text(runs, "model"), _text(runs, "precision")
    dataset, samples = _text(runs, "dataset"), _one(runs, "train_samples")
    if dataset.startswith(("folder:", "idx:")):
        dataset = dataset.partition(":")[2].rstrip("/").rsplit("/", 1)[-1]
    if _of_command(runs):  # nothing is known of it but its command and parameters
        return [" and ".join(rate_sources(runs))]
    on = f"{model or 'models'} on {dataset or 'several datasets'}"
    return [f"{on}, {samples} images" if samples else on, precision]


def _of_command(runs: pd.DataFrame) -> bool:
    """Whether the runs are of another program, which may have a parameter called model."""
    measured = runs["throughput_source"].notna().any()
    return bool(runs["model"].isna().all() or (measured and runs["epochs_planned"].isna().all()))


def _text(runs: pd.DataFrame, name: str) -> str:
    values = runs[name].dropna().unique()
    return str(values[0]) if len(values) == 1 else ""


def _batch(runs: pd.DataFrame) -> str:
    """The batch that is constant in each kind of scaling."""
    words = []
    for scaling, name, what in (
        ("strong", "global_batch_size", "global batch"),
        ("weak", "batch_size_per_rank", "batch per rank"),
    ):
        own = runs[runs["scaling"] == scaling]
        if len(own):
            batch = _one(own, name)
            words.append(f"{scaling} scaling" + (f", {what} {batch}" if batch else ""))
    return " and ".join(words)


def _repeats(runs: pd.DataFrame, spread: str) -> str:
    repeats = int(runs["repeat"].max()) + 1 if runs["repeat"].notna().any() else 1
    return f"{spread} of {repeats} repeats" if repeats > 1 else ""
