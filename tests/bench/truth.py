"""How true the statistics are: made-up studies of known truth, and published scaling tables.

Coverage, errors and widths of forecasts, and coverage of intervals where noise is not independent.
The priors of weak scaling were chosen by the published tables.

    python tests/bench/truth.py                    some minutes
    python tests/bench/truth.py --studies 20       in seconds, rough
"""

import argparse
import csv
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench import Figures, report
from jobkit.analysis.findings.conditions import caveats
from jobkit.analysis.scaling.predict import Prediction
from jobkit.analysis.tables.columns import RESULTS
from jobkit.analysis.tables.frames import frame
from support.measured_study import results_from, runs_of

Generator = np.random.Generator


# Published tables, and what they say of the cost of a second node

TABLES = Path(__file__).with_name("published.csv")


def published() -> pd.DataFrame:
    """Forecasts of the published tables, from three sizes up, of every larger size."""
    tables: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    lines = TABLES.read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = row["table"], row["scaling"], row["ranks_per_node"]
        tables[key][int(row["ranks"])] = float(row["rate"])
    rows = []
    for (table, scaling, on_node), rates in tables.items():
        sizes, per_node = sorted(rates), int(on_node or 0)  # 0: the source does not say it
        for count in range(3, len(sizes)):
            fitted = {n: [rates[n]] for n in sizes[:count]}
            held = {n: rates[n] for n in sizes[count:]}
            facts = {"truth": "published", "table": table}
            for row in _predicted(fitted, held, scaling, per_node):
                leaves = sizes[count - 1] <= per_node < row["n"]
                boundary = "first node boundary beyond" if leaves else "none beyond"
                rows.append(facts | row | {"boundary": boundary})
    return pd.DataFrame(rows)


def hidden(studies: int) -> pd.DataFrame:
    """Forecasts from 1 to 8 ranks in strong scaling with an all-reduce, 3 repeats at 3 % noise.

    It takes 0.5 to 6 % of a step on one rank, between nodes one to three times as much; half of the
    compute hides it, or none.
    """
    rows: list[dict[str, Any]] = []
    for part, per_node, told in itertools.product((0.0, 0.5), (None, 4, 8), (True, False)):
        if told and not per_node:
            continue
        name = f"{'half hidden' if part else 'not hidden'}, {per_node or 'all'} per node"
        for i in range(studies):
            g = np.random.default_rng([3, i, per_node or 1])
            inside = 10 ** g.uniform(-2.3, -1.2)
            between, serial = inside * g.uniform(1, 3), 10 ** g.uniform(-4, -2.3)
            noise = {n: np.exp(0.03 * g.standard_normal(3)) for n in (1, 2, 4, 8, 16, 32, 64)}
            truth = {}
            for n in noise:
                sent = inside * (1 - 1 / n) + between * (1 - 1 / math.ceil(n / (per_node or n)))
                truth[n] = 1000 / (1 / n + serial + max(0.0, sent - part / n))
            fitted = {n: list(truth[n] * noise[n]) for n in (1, 2, 4, 8)}
            held = {n: float(truth[n] * noise[n][0]) for n in (16, 32, 64)}
            facts = {"truth": name + (", told" if told else "")}
            rows += [facts | row for row in _predicted(fitted, held, "strong", told and per_node)]
    return pd.DataFrame(rows)


def _predicted(
    fitted: dict[int, list[float]], held: dict[int, float], scaling: str, per_node: int | None
) -> Iterator[dict[str, Any]]:
    """By size beyond: a row of the bench."""
    runs = [(n, x) for n, rates in fitted.items() for x in rates]
    found = Prediction([n for n, _ in runs], [x for _, x in runs], scaling, per_node or None)
    for n, rate in held.items():
        made = {"n": n, "times": n / max(fitted), "refused": bool(found.refused(n))}
        value, low, high = found.rate(n)
        made |= {"error": abs(value / rate - 1), "held": low <= rate <= high}
        yield made | {"width": high / low}


def summary(found: pd.DataFrame, by: str = "truth") -> Iterator[str]:
    """Lines of a Markdown table: by group and distance, coverage, errors and widths."""
    yield f"| {by} | beyond | n | refused | held | error: median | p90 | high/low: median |"
    yield "|---|---|---|---|---|---|---|---|"
    bins = (("to 2x", 0, 2), ("to 4x", 2, 4), ("over 4x", 4, 1e9))
    for group, part in found.groupby(by, sort=False):
        for name, low, high in bins:
            own = part[(part["times"] > low) & (part["times"] <= high)]
            made = own[~own["refused"]]
            if made.empty:
                continue
            yield (
                f"| {group} | {name} | {len(own)} | {own['refused'].mean():.0%} | "
                f"{made['held'].mean():.0%} | {made['error'].median():.1%} | "
                f"{made['error'].quantile(0.9):.0%} | {made['width'].median():.2f} |"
            )


# Noise that is not independent, as logarithms in standard deviations of a run, of a study of 1, 2,
# 4 and 8 ranks. A run has as many of 32 nodes as ranks; runs start one after the other, shuffled.
Rows = list[dict[str, Any]]


def _independent(rows: Rows, g: Generator) -> Any:
    return g.standard_normal(len(rows))


def _grows(rows: Rows, g: Generator) -> Any:
    """From a quarter to twice the noise on the largest size."""
    return [row["world_size"] / 4 * g.standard_normal() for row in rows]


def _shared(rows: Rows, g: Generator) -> Any:
    """The repeats of a size share their nodes, which differ as much as runs do."""
    of_size = {n: g.standard_normal() for n in (1, 2, 4, 8)}
    for row in rows:
        row["node_list"] = f"n{row['world_size']}"
    return [of_size[row["world_size"]] + g.standard_normal() / 3 for row in rows]


def _walk(rows: Rows, g: Generator) -> Any:
    """A drift over the study: a walk that ends a standard deviation away, and half the noise."""
    steps = np.cumsum(g.standard_normal(len(rows))) * 2 / math.sqrt(len(rows))
    places = np.argsort(np.argsort([row["start_time_s"] for row in rows]))
    return steps[places] + g.standard_normal(len(rows)) / 2


def _in_order(rows: Rows, g: Generator) -> Any:
    """The same, small sizes first."""
    for i, row in enumerate(rows):
        row["start_time_s"] = 1.7e9 + 1000.0 * i
    return _walk(rows, g)


def _slow_node(rows: Rows, g: Generator) -> Any:
    """One node of 32 is 17 % slower."""
    slow = [math.log(0.83) / NOISE * ("n0," in row["node_list"]) for row in rows]
    return slow + g.standard_normal(len(rows))


def _two_kinds(rows: Rows, g: Generator) -> Any:
    """A run has nodes of one of two kinds, with clocks of 1 and 0.8."""
    slow = g.random(len(rows)) < 0.4
    for row, is_slow in zip(rows, slow, strict=True):
        own = g.choice(8, row["world_size"], replace=False)
        row["node_list"] = ",".join(f"{'slow' if is_slow else 'fast'}{n}" for n in own) + ","
    return slow * math.log(0.8) / NOISE + g.standard_normal(len(rows))


NOISE = 0.03
LIFE = {
    "independent": _independent,
    "grows with the size": _grows,
    "repeats share their nodes": _shared,
    "drift, shuffled": _walk,
    "drift, in order of size": _in_order,
    "one slow node of 32": _slow_node,
    "two kinds of nodes": _two_kinds,
}


def life(studies: int) -> Iterator[str]:
    """How often the interval of the efficiency at 8 ranks holds, and how often a doubt is named."""
    yield "| noise of 3 % | repeats | held at 8 | high/low | doubt named | held or named |"
    yield "|---|---|---|---|---|---|"
    for name, noise in LIFE.items():
        for repeats in (2, 3, 5):
            seen: dict[str, list[float]] = defaultdict(list)
            for i in range(studies):
                g = np.random.default_rng([4, i, repeats])
                truth = {n: [1000 * n * 0.98 ** math.log2(n)] * repeats for n in (1, 2, 4, 8)}
                rows = runs_of({"ddp": truth})
                for row, place in zip(rows, g.permutation(len(rows)), strict=True):
                    own = g.choice(32, row["world_size"], replace=False)
                    row["node_list"] = "".join(f"n{n}," for n in own)
                    row["start_time_s"] = 1.7e9 + 1000.0 * place
                for row, log in zip(rows, noise(rows, g), strict=True):
                    row["throughput"] *= math.exp(NOISE * log)
                results = results_from(frame(rows, RESULTS))
                largest = results.sizes[-1]
                low, high = largest.interval("efficiency") or (math.nan, math.nan)
                named = any(c.doubts for c in caveats(results, "GPUs", largest))
                held = low <= 0.98**3 <= high
                seen["held"].append(held)
                seen["width"].append(high / low)
                seen["named"].append(named)
                seen["either"].append(held or named)
            shares = (f"{np.mean(seen[key]):.1%}" for key in ("held", "named", "either"))
            held, named, either = shares
            width = f"{np.median(seen['width']):.2f}"
            yield f"| {name} | {repeats} | {held} | {width} | {named} | {either} |"


def figures_of(name: str, found: pd.DataFrame) -> Figures:
    """Coverage and median error of the forecasts to twice and to four times the measured size."""
    figures = Figures()
    for factor in (2, 4):
        made = found[(found["times"].between(factor / 2, factor, "right")) & ~found["refused"]]
        figures[f"{name}, to {factor}x: held, %"] = 100 * made["held"].mean()
        figures[f"{name}, to {factor}x: error, %"] = 100 * made["error"].median()
    return figures


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--studies", type=int, default=100, help="studies for each row")
    parser.add_argument("--only", choices=("hidden", "published", "life"))
    args = parser.parse_args()
    figures = Figures()
    if args.only in (None, "hidden"):
        print(*summary(found := hidden(args.studies)), "", sep="\n", flush=True)
        figures |= figures_of("hidden communication", found)
    if args.only in (None, "published"):
        found = published()
        for table, by in ((found, "truth"), (found, "boundary"), (found.assign(all="all"), "all")):
            print(*summary(table, by), "", sep="\n", flush=True)
        figures |= figures_of("published", found)
    if args.only in (None, "life"):
        print(*life(args.studies), "", sep="\n", flush=True)
    return report(figures, at_least={name: 90 for name in figures if name.endswith("held, %")})


if __name__ == "__main__":
    sys.exit(main())
