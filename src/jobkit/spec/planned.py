"""PlannedRun: what a plan, and all that follows it, knows of a run, whichever program it starts."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar

COMMAND_LINE = "command line"  # of comparable(): no parameter can have this name


class PlannedRun(ABC):
    """One planned run of a program at a size: a frozen dataclass, checked when it is made."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    # Packages that the Python of jobkit needs, to start it on this machine.
    packages: ClassVar[tuple[str, ...]] = ()
    writes_spec: ClassVar[bool] = False  # the program leaves spec.json in its folder
    # Settings that the program decides by its device where they have these values.
    left_to_device: ClassVar[Mapping[str, Any]] = {}

    nodes: int
    ranks_per_node: int
    repeat: int
    stop_signal: str

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @property
    @abstractmethod
    def slug(self) -> str:
        """The readable part of the run_id."""

    @property
    @abstractmethod
    def planned_device(self) -> str | None:
        """'cuda', 'cpu' or 'auto'; None: the program decides."""

    @property
    @abstractmethod
    def planned_epochs(self) -> int | None:
        """Passes over the training samples; None: the program decides."""

    @property
    def run_id(self) -> str:
        """A readable slug and a short hash of what differs from the defaults.

        Hashing only the differences keeps the id when a later version adds a setting.
        """
        identity = {f.name for f in fields(self) if f.metadata["identity"]}
        content = {k: v for k, v in self.differences().items() if k in identity}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{self.slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"

    def differences(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != _default(f)}

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return dict(vars(self))

    @abstractmethod
    def arguments(self) -> list[str]:
        """What run.sh gets for this run, besides its size and its folder."""

    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """What is planned, by the names of the columns of results.csv."""

    @abstractmethod
    def comparable(self) -> Mapping[str, Any]:
        """What two runs of one series must share."""

    def decided(self, recorded: "PlannedRun") -> "PlannedRun":
        """What is planned, with what it leaves to the device as a run recorded it."""
        return self

    def differing(self, recorded: "PlannedRun") -> dict[str, tuple[Any, Any]]:
        """The settings that a run recorded otherwise: as recorded, as planned.

        Empty where the program records none.
        """
        return {}

    @property
    def data(self) -> str | None:
        """The data set, if it is known before the start."""
        return None

    @property
    def whole_node(self) -> bool:
        """Whether one rank uses every GPU of its node."""
        return False

    @property
    def program(self) -> str | None:
        """The command that must be on the machine; None: jobkit has it."""
        return None


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()
