"""What `up` made, kept in the cluster's folder as minicluster.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from minicluster.config import Options
from minicluster.layout import ClusterError, Layout, check_entry, check_owner
from minicluster.processes import Process, boot_id

FORMAT = 1


@dataclass(frozen=True)
class Fault:
    """A link that `link cut` or `link slow` changed; rate is empty for a cut."""

    nodes: list[str]
    rate: str = ""

    def __str__(self) -> str:
        if self.rate:
            return f"{self.nodes[0]} slowed to {self.rate}"
        if len(self.nodes) == 1:
            return f"{self.nodes[0]} cut from everything"
        return f"{self.nodes[0]} and {self.nodes[1]} cut from each other"


@dataclass
class State:
    """The cluster in one folder; phase is starting, or up."""

    options: Options
    phase: str = "starting"
    base_port: int = 0
    subnet: str | None = None
    user: str = ""
    names_resolve: bool = False
    notes: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    boot: str = field(default_factory=boot_id)

    def process(self, name: str) -> Process | None:
        return next((process for process in self.processes if process.name == name), None)

    def forget(self, name: str) -> None:
        """Drop the record of a process that has ended."""
        self.processes = [process for process in self.processes if process.name != name]

    def alive(self, process: Process) -> bool:
        return self.boot == boot_id() and process.alive()

    def dead(self) -> list[str]:
        """Names of the daemons that should run and do not."""
        return [process.name for process in self.processes if not self.alive(process)]

    def healthy(self) -> bool:
        return self.phase == "up" and not self.dead()


def save(layout: Layout, state: State) -> None:
    """Write beside, then rename: a reader, or a crash, never sees half a file."""
    beside = layout.state_file_beside
    beside.write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=1) + "\n")
    beside.replace(layout.state_file)


def load(layout: Layout) -> State | None:
    """The state; None where no cluster was made or its file is not to be read."""
    try:
        text = layout.state_file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise ClusterError(f"{layout.state_file}: you may not read it; use --dir") from None
    try:
        return _from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _from_json(data: dict[str, Any]) -> State:
    if data.pop("format") != FORMAT:
        raise ValueError("written by another version")
    data["options"] = Options(**data["options"])
    data["processes"] = [Process(**entry) for entry in data["processes"]]
    data["faults"] = [Fault(**entry) for entry in data["faults"]]
    return State(**data)


def running(layout: Layout, reading: bool = False) -> State:
    """The state of the cluster that is up, or ClusterError.

    reading: root's cluster is fine too. Raises UsageError where somebody else may write what is
    about to be believed and executed.
    """
    if layout.root.exists():
        check_owner(layout.root, reading)
        for path in (layout.state_file, layout.slurm_conf):
            if path.is_symlink() or path.exists():
                check_entry(path, reading)
    current = load(layout)
    if current is None or current.phase != "up":
        raise ClusterError(f"no cluster is up in {layout.root}; start one: hpc/minicluster up")
    return current
