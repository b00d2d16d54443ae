"""What a preflight is to check."""

from dataclasses import dataclass
from pathlib import Path

from jobkit.paths import data_root
from jobkit.spec.runspec import RunSpec


@dataclass(frozen=True)
class Wish:
    """What is to be checked."""

    run_dir: Path
    spec: RunSpec
    timeout_s: float
    as_json: bool

    @property
    def group_s(self) -> float:
        """For the group to form, and for each of its collectives."""
        return max(self.timeout_s / 2, 5.0)

    @property
    def together_s(self) -> float:
        """For all that the ranks do together."""
        return self.group_s + 12

    @property
    def data_dir(self) -> Path:
        """Where the data and their cache lie."""
        given = self.spec.data_dir
        return Path(given).expanduser().absolute() if given else data_root()
