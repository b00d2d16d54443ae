"""What the checks of an allocation are asked: values that the command line and the ranks share."""

from dataclasses import dataclass
from pathlib import Path

from jobkit.paths import data_root, expanded
from jobkit.spec.runspec import RunSpec


@dataclass(frozen=True)
class PreflightRequest:
    """What a preflight is to check, and how long it may take."""

    run_dir: Path
    spec: RunSpec
    timeout_s: float
    as_json: bool

    @property
    def group_s(self) -> float:
        """The seconds for the group to form, and for each of its collectives."""
        return max(self.timeout_s / 2, 5.0)

    @property
    def together_s(self) -> float:
        """The seconds for all that the ranks do together."""
        return self.group_s + 12

    @property
    def data_dir(self) -> Path:
        """The folder of the data and their cache."""
        given = self.spec.data_dir
        return expanded(given) if given else data_root()
