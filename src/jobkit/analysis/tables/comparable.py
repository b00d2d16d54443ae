"""Which runs must not be compared: what has to be the same in all runs of a series."""

import pandas as pd

# Only where these are the same does a curve show the effect of the size.
SAME = ("model", "dataset", "precision", "fp32", "device_type", "torch_version", "throughput_unit")
# Where one of these differs within a series the curve may show it instead of the size.
MIXED = ("device", "git_commit")
COPIES = (
    "{} copies: nothing shows that the ranks worked together (no process group, no connection, no "
    "shared memory); start the program as one, as with torchrun, or --launcher once and mpirun, or "
    "state --together"
)
_BATCH = {"strong": "global_batch_size", "weak": "batch_size_per_rank"}


def faults(runs: pd.DataFrame) -> dict[str, str]:
    """The series whose runs must not be compared with each other, and the reason."""
    ok = runs[runs["status"] == "ok"]
    reasons = {str(name): _fault(group) for name, group in ok.groupby("series")}
    return {name: reason for name, reason in reasons.items() if reason}


def _fault(runs: pd.DataFrame) -> str:
    """The first column that must be the same and is not, with its values; empty where all are."""
    copies = runs.loc[runs["ranks_together"] == "none", "world_size"]
    if not copies.empty:
        return COPIES.format(int(copies.max()))
    batch = [_BATCH[s] for s in runs["scaling"].dropna().unique() if s in _BATCH]
    for name in ("strategy", "scaling", *SAME, *batch):
        values = runs[name].dropna().unique()
        if len(values) > 1:
            return f"{name} differs ({', '.join(sorted(map(str, values)))})"
    return ""


def apart(runs: pd.DataFrame) -> pd.Series:
    """The series of each run, with its device model and commit where the study mixes them."""
    names = runs["series"].copy()
    for name in MIXED:
        if runs[name].nunique() > 1:
            short = runs[name].astype("string").str[: 12 if name == "git_commit" else 40]
            names = names + ", " + short.fillna("unknown")
    return names
