"""One column of a CSV file, and columns as a Markdown table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column: its name with the unit in it, its type, and its meaning."""

    name: str
    dtype: str  # of pandas, a nullable one
    meaning: str


TEXT, COUNT, NUMBER, FLAG = "string", "Int64", "Float64", "boolean"


def markdown(columns: tuple[Column, ...]) -> str:
    """The columns as a Markdown table, for the documentation."""
    lines = ["| column | meaning |", "|---|---|"]
    cells = (c.meaning.replace("|", "\\|") for c in columns)
    return "\n".join(
        [*lines, *(f"| `{c.name}` | {t} |" for c, t in zip(columns, cells, strict=True))]
    )
