"""Published scaling tables, and what they say of the cost of a second node, for truth.py."""

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jobkit.analysis.scaling.laws import PRIORS, Priors

TABLES = Path(__file__).with_name("published.csv")
_LEAST_LOSS = 0.005  # of a second node: a smaller one, or a gain, counts as this


@dataclass(frozen=True)
class Table:
    """The rate by number of ranks. per_node: ranks of a full node, where the source says it."""

    name: str
    scaling: str
    per_node: int | None
    rates: dict[int, float]

    @property
    def family(self) -> str:
        """The framework, or the kind of machine, that a table shares with others."""
        return self.name.split("/")[0].split()[0]


def published_tables() -> list[Table]:
    """All tables of published.csv."""
    found: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    lines = TABLES.read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = row["table"], row["scaling"], row["ranks_per_node"]
        found[key][int(row["ranks"])] = float(row["rate"])
    return [Table(t, s, int(n) if n else None, rates) for (t, s, n), rates in found.items()]


def _losses(tables: Sequence[Table]) -> np.ndarray:
    """Logarithms of the loss over one node + 0.01, and of that of the second node: (tables, 2)."""
    rows = []
    for table in tables:
        full, one = table.per_node or 0, table.rates.get(1)
        node, two = table.rates.get(full), table.rates.get(2 * full)
        if one and node and two:
            inside, across = full * one / node, 2 * full * one / two
            rows.append((max(0.0, inside - 1) + 0.01, max(_LEAST_LOSS, across - inside)))
    return np.log(np.array(rows))


def node_prior(tables: Sequence[Table]) -> Priors:
    """The prior of a second node's cost that these tables give, by least squares.

    The spread is that of the residuals above 0: losses below the middle hardly change a forecast.
    """
    inside, across = _losses(tables).T
    features = np.stack([np.ones_like(inside), inside], axis=1)
    (offset, slope), *_ = np.linalg.lstsq(features, across, rcond=None)
    residuals = across - features @ (offset, slope)
    spread = float(np.sqrt(np.mean(residuals[residuals > 0] ** 2)))
    return replace(PRIORS, node_offset=offset, node_slope=slope, node_spread=spread)


def node_losses(tables: Sequence[Table]) -> Iterator[str]:
    """Lines of a Markdown table: the prior of all families, and of all but one."""
    yield "| without | offset | slope | spread |"
    yield "|---|---|---|---|"
    for family in ("-", *dict.fromkeys(t.family for t in tables if t.per_node)):
        found = node_prior([t for t in tables if t.family != family])
        values = found.node_offset, found.node_slope, found.node_spread
        yield f"| {family} | {' | '.join(f'{v:.2f}' for v in values)} |"
