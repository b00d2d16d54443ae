"""Definition of a fault, and the interface of the run that its actions use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from jobkit.drill.place import Place, Started
from jobkit.launch.slurm.options import Options
from jobkit.paths import RunPaths


class Daemons(Protocol):
    """The methods of the minicluster that faults use."""

    @property
    def saved_at(self) -> float:
        """When slurmctld last saved its state, in Unix seconds."""

    def do(self, *words: str) -> None:
        """Run a command of the minicluster. Raises UsageError where it fails."""


class RunUnderFault(Protocol):
    """The interface of the run that a fault is injected into, for the fault's actions."""

    place: Place
    paths: RunPaths
    mark: str
    checkpoint_bytes: int
    injected_at: float

    @property
    def started(self) -> Started:
        """The latest start of the run."""

    @property
    def minicluster(self) -> Daemons:
        """The cluster whose daemons may be killed."""

    def nodes(self) -> list[str]:
        """The nodes of the first start."""

    def target(self) -> str:
        """The node that the fault is injected into."""

    def preempt(self) -> None:
        """Submit a job that preempts the run on its nodes."""

    def namespace(self) -> int:
        """Return a process in the mount namespace of the ranks."""

    def check(self, good: bool, else_: str) -> None:
        """Raise Lost with this text unless good."""

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds."""


Act = Callable[[RunUnderFault], None]


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """One fault: how it is injected, what it needs, and the expected status."""

    name: str
    text: str  # what happens
    first: tuple[str, ...]  # the accepted statuses of the attempt that it hits
    kind: str = "hold"  # JOBKIT_FAULT's: what the payload does to itself; hold: it pauses
    where: tuple[str, ...] = ("slurm",)
    needs: str = ""  # minicluster, links, root, urgent
    lane: str = "shared"
    one_node: bool = False  # both ranks on one node
    settings: dict[str, object] = field(default_factory=dict)  # beside the drill's own
    options: Options = field(default_factory=dict)  # of sbatch, for the first start
    before: Act | None = None  # before the first start
    inject: Act | None = None  # from outside, once the rank pauses
    later: Act | None = None  # once the next attempt has begun
    between: Act | None = None  # before it is started again
    after: Act | None = None  # at the end, whatever the outcome
