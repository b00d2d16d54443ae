"""A threshold on parallel efficiency, for scripts."""

import pandas as pd

from jobkit.analysis.tables.frames import Row, records
from jobkit.analysis.tables.text import counted
from jobkit.errors import UsageError
from jobkit.spec.runspec import ONE_RANK


def check_efficiency(table: pd.DataFrame, least: float, at: int) -> list[str]:
    """One line for each series that is below the efficiency at that many ranks.

    table: as scaling.scaling_table makes it. A series with no efficiency at that size does not
    pass: it was not measured, or it is its own baseline. Raises UsageError where nothing was
    planned at that size.
    """
    rows = table[(table["world_size"] == at).fillna(False)]
    if rows.empty:
        sizes = ", ".join(str(n) for n in sorted(table["world_size"].dropna().unique()))
        raise UsageError(f"--at {at}: the study has no such size (it has: {sizes or 'none'})")
    said = [_fault(row, least) for row in records(rows)]
    several = table[~table["strategy"].isin(ONE_RANK)]  # the others have one size
    absent = sorted(set(several["series"].dropna()) - set(rows["series"].dropna()))
    return [line for line in said if line] + [
        f"{series}: not planned at {counted(at, 'rank')}" for series in absent
    ]


def _fault(row: Row, least: float) -> str:
    """Why a row is below the threshold; empty where it is not."""
    where = f"{row['series']} at {counted(row['world_size'], 'rank')}"
    if row["nodes"] > 1:
        where += f" on {row['nodes']} nodes"
    found = row["efficiency"]
    if pd.isna(found):
        return f"{where}: no efficiency: {row['note']}"
    if row["base_world_size"] == row["world_size"]:
        return f"{where}: no efficiency: no smaller size was measured to compare with"
    if found >= least:
        return ""
    ends = ""
    if pd.notna(row["efficiency_low"]):
        ends = f" [{row['efficiency_low']:.1%}, {row['efficiency_high']:.1%} at 95%]"
    base = f"relative to {counted(row['base_world_size'], 'rank')}"
    return f"{where}: efficiency {found:.1%}{ends} is below {least:.1%} ({base})"
