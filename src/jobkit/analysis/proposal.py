"""The table that a proposal wants: GPUs, nodes, time, speed-up, efficiency and what it costs.

As rows of text for the report, as Markdown and as LaTeX.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from jobkit.analysis.frames import records
from jobkit.analysis.scaling import RULE

NONE = "-"
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"}
_LATEX["["] = "{[}"  # at the start of a row it would be an argument of the line's end
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


@dataclass(frozen=True)
class TextTable:
    """A table of texts: its first columns are words, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # columns that are aligned left
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """As GitHub reads it; no cell can end the table or make a tag."""
        marks = ["---" if i < self.words else "---:" for i in range(len(self.heads))]
        lines = [self.heads, marks, *self.rows]
        body = "\n".join(f"| {' | '.join(map(_markdown, line))} |" for line in lines)
        return "\n\n".join([body, *(_markdown(note) for note in self.notes)]) + "\n"

    def latex(self) -> str:
        """As a tabular of the package booktabs."""
        columns = "l" * self.words + "r" * (len(self.heads) - self.words)
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (self.heads, *self.rows)]
        return "\n".join(
            [
                *(f"% {_latex(note)}" for note in self.notes),
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
                "",
            ]
        )


def proposal_table(table: pd.DataFrame, unit: str) -> TextTable:
    """The scaling of a study, a row for each series and size. unit: GPUs, or processes (ranks)."""
    heads = ["series", "scaling", unit, "nodes", "time per epoch (s)", "speed-up", "efficiency"]
    hours = "GPU-hours" if unit == "GPUs" else "process-hours"
    heads += [f"{hours} per epoch", "node-hours per epoch", *_accuracy_head(table)]
    rows = [_row(row, len(heads) == 10) for row in records(table)]
    return TextTable(heads, rows, 2, notes(table))


def notes(table: pd.DataFrame) -> list[str]:
    """What speed-up, efficiency and the brackets of the table are."""
    lines = [f"Speed-up and efficiency are relative to {RULE}."]
    origins = sorted(table["spread_from"].dropna().unique())
    if origins:
        share = float(table["confidence_share"].min())
        least = f", where the values are fewest {share:.0%} at most" if share < 0.95 else ""
        over = ", ".join(origins)
        lines.append(f"In brackets: bootstrap interval of the median over {over}; 95%{least}.")
    else:
        lines.append("Measured once at each size: a difference may be chance.")
    return lines


def _accuracy_head(table: pd.DataFrame) -> list[str]:
    target = table["target_accuracy"].dropna()
    return [f"time to {float(target.iloc[0]):.0%} accuracy (s)"] if len(target) else []


def _row(row: Mapping[str, Any], accuracy: bool) -> list[str]:
    cells = [
        say(row["series"]),
        say(row["scaling"]),
        say(row["world_size"]),
        say(row["nodes"]),
        with_interval(row, "time_per_epoch", "{:.4g}", "_s"),
        with_interval(row, "speed_up", "{:.2f}"),
        with_interval(row, "efficiency", "{:.0%}"),
        say(row["gpu_hours_per_epoch"], "{:.3g}"),
        say(row["node_hours_per_epoch"], "{:.3g}"),
    ]
    return [*cells, say(row["time_to_accuracy_s"], "{:.4g}")] if accuracy else cells


def with_interval(row: Mapping[str, Any], name: str, form: str, unit: str = "") -> str:
    """A value and, in brackets, its interval; the baseline has none relative to itself."""
    text = say(row[f"{name}{unit}"], form)
    low, high = row[f"{name}_low{unit}"], row[f"{name}_high{unit}"]
    if pd.isna(low) or (low == high == 1):
        return text
    return f"{text} [{say(low, form)}, {say(high, form)}]"


def say(value: Any, form: str = "{}") -> str:
    """A cell as text, with no exponent in a large number; a dash where it is empty."""
    if pd.isna(value):
        return NONE
    text = form.format(value)
    return f"{value:,.0f}" if "e+" in text else text


def rounded(value: float) -> str:
    """A rate with four digits that say something, and no exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))
