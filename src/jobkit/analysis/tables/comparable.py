"""Which runs must not be compared: what has to be the same in all runs of a series."""

import pandas as pd

# Only where these are the same does a curve show the effect of the size.
SAME = ("model", "dataset", "precision", "fp32", "device_type", "torch_version", "throughput_unit")
_BATCH = {"strong": "global_batch_size", "weak": "batch_size_per_rank"}


def faults(runs: pd.DataFrame) -> dict[str, str]:
    """The series whose runs must not be compared with each other, and the reason."""
    used = ["series", "strategy", "scaling", *SAME, *_BATCH.values()]
    ok = runs.loc[runs["status"] == "ok", used]
    found = {str(name): _fault(group) for name, group in ok.groupby("series")}
    return {name: wrong for name, wrong in found.items() if wrong}


def _fault(runs: pd.DataFrame) -> str:
    """The first column that must be the same and is not, with its values; empty where all are."""
    scalings = runs["scaling"].dropna().unique()
    batch = [_BATCH[s] for s in scalings if s in _BATCH]
    for name in ("strategy", "scaling", *SAME, *batch):
        if runs[name].nunique() > 1:
            return f"{name} differs ({_values(runs, name)})"
    return ""


def _values(runs: pd.DataFrame, name: str) -> str:
    return ", ".join(str(v) for v in sorted(runs[name].dropna().unique()))
