"""The exercises: number, title, page, and the modules of their probes and checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "skeletons"


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise of docs/exercises."""

    number: str
    title: str
    page: str  # of docs/exercises, without .md
    probes: Sequence[str]  # functions of jobkit.exercise.probes, as module:function
    check: str = ""  # module of jobkit.exercise.checks
    file: str = ""  # the name that the document gives the file to complete

    @property
    def skeleton(self) -> Path:
        """The file to complete."""
        return _FOLDER / f"{self.number}.txt"


_ALL = (
    Exercise(
        number="1.1", title="shapes and batch sizes", page="1-model", probes=["shapes:batches"]
    ),
    Exercise(
        number="2.1",
        title="the process group",
        page="2-setup",
        probes=["joining:places", "joining:incomplete"],
        check="setup",
        file="distributed_utils.py",
    ),
    Exercise(
        number="3.1",
        title="the data of each rank",
        page="3-data",
        probes=["loading:shares", "loading:orders", "loading:files", "loading:uneven"],
        check="loading",
        file="data.py",
    ),
    Exercise(
        number="4.1",
        title="DDP: what is replicated",
        page="4-strategies",
        probes=["replicas:gradients", "replicas:held"],
        check="wrapping",
        file="ddp_utils.py",
    ),
    Exercise(
        number="4.2",
        title="FSDP and mixed precision",
        page="4-strategies",
        probes=["sharding:forward", "sharding:groups", "rounding:bytes_and_time", "rounding:sums"],
    ),
    Exercise(
        number="4.3",
        title="DDP against FSDP",
        page="4-strategies",
        probes=["messages:per_step"],
    ),
    Exercise(
        number="5.1",
        title="the whole program",
        page="5-program",
        probes=["ending:devices", "ending:left_over", "ending:alone", "ending:launchers"],
        check="program",
        file="main.py",
    ),
    Exercise(
        number="6.1",
        title="training and validation",
        page="6-training",
        probes=["training:gradients", "training:memory", "training:modes", "training:means"],
        check="training",
        file="train.py",
    ),
    Exercise(
        number="6.2", title="DDP and FSDP train", page="6-training", probes=["runs:trainings"]
    ),
    Exercise(number="7.1", title="a small study", page="7-scaling", probes=["runs:study"]),
    Exercise(
        number="7.2", title="its figures and sentences", page="7-scaling", probes=["runs:sentences"]
    ),
)
EXERCISES = {each.number: each for each in _ALL}
