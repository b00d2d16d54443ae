"""Which runs of a large study a report lists: nobody reads ten thousand lines."""

import pandas as pd

from jobkit.analysis.collect.results import Results

MOST_LISTED = 200  # runs of a study that are all listed
MOST_OF_A_KIND = 20


def listed(results: Results) -> pd.DataFrame:
    """All runs of a study; of many, some of those not ok and outliers, the slowest and fastest.

    Slow and fast are beside the median rate of the size.
    """
    runs = results.runs
    if len(runs) <= MOST_LISTED:
        return runs
    size = ["series", "nodes", "world_size", "throughput_unit"]
    medians = runs.groupby(size, dropna=False)["throughput"].transform("median")
    beside = (runs["throughput"] / medians).dropna().sort_values(kind="stable")
    odd = {name for text in results.scaling["outliers"].dropna() for name in text.split(", ")}
    kinds = (
        runs.index[runs["status"] != "ok"][:MOST_OF_A_KIND],
        runs.index[runs["run_id"].isin(odd)][:MOST_OF_A_KIND],
        beside.index[:MOST_OF_A_KIND],
        beside.index[-MOST_OF_A_KIND:],
    )
    return runs.loc[sorted({row for kind in kinds for row in kind})]
