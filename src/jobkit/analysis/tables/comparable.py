"""Which runs must not stand in one curve: what has to be the same in all of them."""

import pandas as pd

# A curve over sizes says something of the size only where all of these are the same.
SAME = ("model", "dataset", "precision", "device_type", "torch_version")
_BATCH = {"strong": "global_batch_size", "weak": "batch_size_per_rank"}


def faults(runs: pd.DataFrame) -> dict[str, str]:
    """The series whose runs must not be compared with each other, and the column that says so."""
    ok = runs[runs["status"] == "ok"]
    found = {str(name): _fault(group) for name, group in ok.groupby("series")}
    return {name: wrong for name, wrong in found.items() if wrong}


def _fault(runs: pd.DataFrame) -> str:
    """The first column in which runs differ that must be alike, and its values; else nothing."""
    scalings = runs["scaling"].dropna().unique()
    batch = [_BATCH[s] for s in scalings if s in _BATCH]
    for name in ("strategy", "scaling", *SAME, *batch):
        if runs[name].nunique() > 1:
            return f"{name} differs ({_values(runs, name)})"
    return ""


def _values(runs: pd.DataFrame, name: str) -> str:
    return ", ".join(str(v) for v in sorted(runs[name].dropna().unique()))
