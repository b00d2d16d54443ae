"""Studies of known rates, as the analysis has them after collecting: no folder is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.columns import EPOCHS, RESULTS, STEPS
from jobkit.analysis.tables.frames import frame

FIXED = {"study": "s", "strategy": "ddp", "status": "ok", "nodes": 1, "model": "cnn"}
FIXED |= {"dataset": "cifar10", "precision": "fp32", "device_type": "cuda", "train_samples": 50000}
FIXED |= {"torch_version": "2.11.0", "global_batch_size": 512, "batch_size_per_rank": 64}


def results_of(series: dict[str, dict[int, Sequence[float]]]) -> Results:
    """A study with these rates: by series and ranks, of each repeat."""
    return results_from(frame(runs_of(series), RESULTS))


def runs_of(
    series: dict[str, dict[int, Sequence[float]]], scaling: str | None = "strong"
) -> list[dict[str, Any]]:
    """The rows of results.csv of such a study."""
    return [
        FIXED
        | {"run_id": f"{name}-{n}-{i}", "series": name, "world_size": n, "repeat": i}
        | {"throughput": float(x), "throughput_unit": "images/s", "scaling": scaling}
        | {"ranks_per_node": n}
        for name, sizes in series.items()
        for n, rates in sizes.items()
        for i, x in enumerate(rates)
    ]


def step_fields(compute, data_wait=(), host=(), communication=0.0) -> dict[str, float]:
    """The columns of a breakdown from what each rank spends, in seconds of a step.

    The step ends on all ranks together: who is done early waits inside its communication.
    """
    n = len(compute)
    data_wait, host = data_wait or [0.0] * n, host or [0.0] * n
    useful = [c + h for c, h in zip(compute, host, strict=True)]
    busy = [u + d for u, d in zip(useful, data_wait, strict=True)]
    wall = max(busy) + communication
    return {
        "compute_s": sum(compute) / n,
        "communication_s": sum(wall - b for b in busy) / n,
        "data_wait_s": sum(data_wait) / n,
        "host_s": sum(host) / n,
        "iteration_s": wall,
        "useful_max_s": max(useful),
        "busy_max_s": max(busy),
        "random_imbalance_s": 0.0,
    }


def results_from(runs: pd.DataFrame, epochs: pd.DataFrame | None = None) -> Results:
    """A study with these runs, and the records of their epochs."""
    of_epochs = frame([], EPOCHS) if epochs is None else epochs
    return Results(folder=Path("s"), runs=runs, epochs=of_epochs, steps=frame([], STEPS))
