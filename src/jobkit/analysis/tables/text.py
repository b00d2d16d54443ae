"""Numbers and tables as text: cells, intervals, Markdown and LaTeX."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

NONE = "-"
# Of a head in LaTeX.
_LINES: Any = {"width": 11, "break_long_words": False, "break_on_hyphens": False}
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}"}  # else other letters in the usual fonts
_LATEX["["] = "{[}"  # at the start of a row it would be an argument of the line's end
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


@dataclass(frozen=True)
class TextTable:
    """A table of texts: words in its first columns, numbers in the others."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # columns that are aligned left
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table as GitHub Markdown; no cell can end the table or open a tag."""
        marks = ["---" if i < self.words else "---:" for i in range(len(self.heads))]
        lines = [self.heads, marks, *self.rows]
        body = "\n".join(f"| {' | '.join(map(_markdown, line))} |" for line in lines)
        return "\n\n".join([body, *(_markdown(note) for note in self.notes)]) + "\n"

    def latex(self) -> str:
        """The table for LaTeX with the package booktabs, narrow, with its notes below it."""
        columns = "l" * self.words + "r" * (len(self.heads) - self.words)
        heads = [r"\\".join(textwrap.wrap(_latex(h), **_LINES)) for h in self.heads]
        heads = [rf"\shortstack[r]{{{h}}}" if " " in h or r"\\" in h else h for h in heads]
        rows = [map(_latex, row) for row in self.rows]
        body = [" & ".join(row) + r" \\" for row in (heads, *rows)]
        notes = [f"{_latex(note)}\\par" for note in self.notes]
        page = [r"{\small\setlength{\tabcolsep}{3pt}%", rf"\begin{{tabular}}{{{columns}}}"]
        page += [r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule"]
        page += [r"\end{tabular}\par}"]
        page += [r"{\footnotesize\noindent", *notes, "}"] if notes else []
        return "\n".join([*page, ""])


def with_interval(value: Any, ends: tuple[Any, Any] | None, form: str) -> str:
    """A value as text with its interval in brackets, where it has one that is seen."""
    text, (low, high) = say(value, form), (say(x, form) for x in ends or (None, None))
    return text if low == high else f"{text} [{low.removesuffix('%')}, {high.removesuffix('%')}]"


def say(value: Any, form: str = "{}") -> str:
    """A cell as text; a dash where it is empty. Significant digits are all written, none as e+."""
    if pd.isna(value):
        return NONE
    text = re.sub(r":\.(\d)g", r":#.\1g", form).format(value).removesuffix(".")
    return f"{value:,.0f}" if "e+" in text else text


def say_accuracy(value: Any) -> str:
    """An accuracy, a share of 1, in percent; one above 1 as it is."""
    return say(value, "{:.1%}" if pd.isna(value) or value <= 1 else "{:.4g}")


def rounded(value: float) -> str:
    """A rate as text, with four significant digits and no exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def counted(count: int, word: str) -> str:
    """A number and its noun, in the plural where it is not one: 1 rank, 2 processes."""
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{count} {word if count == 1 else plural}"


def sentence(text: str) -> str:
    """A clause as a sentence of its own."""
    return f"{text[0].upper()}{text[1:]}."


def some(names: Sequence[str], most: int) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
