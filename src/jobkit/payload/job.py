"""What one rank of a run is started with."""

from dataclasses import dataclass, field
from pathlib import Path

from jobkit.paths import RunPaths
from jobkit.payload.guard.stopping import StopRequest
from jobkit.payload.place import RankEnv
from jobkit.spec.runspec import RunSpec


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """Settings, place and paths of one rank."""

    spec: RunSpec  # its nodes and ranks are those of the place
    place: RankEnv
    paths: RunPaths | None  # None: nothing is written
    attempt: int = 0
    dry_run: bool = False
    notes: tuple[str, ...] = ()  # warnings from before the start
    stop: StopRequest = field(default_factory=StopRequest)
    resume_from: Path | None = None
    fresh: bool = False  # resume from no earlier attempt
    restarted: bool = False  # the job was started before, with the same options
