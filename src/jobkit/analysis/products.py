"""The files that the analysis adds to a study: their names, and how they are written."""

from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.paths import write_whole


@dataclass(frozen=True)
class Products:
    """The files of a study that tell how it scales."""

    folder: Path

    @property
    def scaling(self) -> Path:
        return self.folder / "scaling.csv"

    @property
    def table_markdown(self) -> Path:
        """The table of a proposal."""
        return self.folder / "scaling.md"

    @property
    def table_latex(self) -> Path:
        return self.folder / "scaling.tex"

    @property
    def forecast(self) -> Path:
        return self.folder / "forecast.csv"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"


def save(path: Path, text: str) -> None:
    """Write a file whole; raises UsageError where that cannot be done."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
