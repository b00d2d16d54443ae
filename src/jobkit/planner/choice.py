"""Which strategy fits and communicates least."""

import shlex
from dataclasses import dataclass

from jobkit.planner.footprints import Footprint, Subject, footprints, strategy_of, variants
from jobkit.planner.traffic import duration, step_messages, step_s
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Links, waits
from jobkit.units import GIB


@dataclass(frozen=True, kw_only=True)
class Option:
    """A strategy, and what it costs."""

    footprint: Footprint
    fits: bool
    seconds: float  # of communication in a step, at least; NaN: not known
    waits: int | None  # for other ranks in a step, at most; None: not known
    idle: float  # share of a step

    @property
    def label(self) -> str:
        """The strategy with its mode."""
        return self.footprint.label

    @property
    def splits_model(self) -> bool:
        """Whether it splits the model over the ranks; the others split the batch."""
        return FACTS[self.footprint.spec.strategy].splits_model


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a training at a size, with the memory that each GPU may use."""

    base: RunSpec
    subject: Subject
    usable: float
    links: Links

    def options(self) -> tuple[list[Option], dict[str, str]]:
        """Every strategy with its costs, and why the others are not applicable."""
        found, refused = footprints(self.base, self.subject, _labels(self.base))
        return [self._option(each) for each in found], refused

    def _option(self, each: Footprint) -> Option:
        messages = step_messages(each, self.subject)
        return Option(
            footprint=each,
            fits=each.total <= self.usable,
            seconds=step_s(messages, self.links),
            waits=None if messages is None else waits(messages),
            idle=strategy_of(each.spec).idle_share(),
        )


def _labels(base: RunSpec) -> list[str]:
    """The strategies that a number of GPUs leaves to choose from, with their modes."""
    one_rank = base.world_size == 1
    return [
        label
        for label, spec in variants(base).items()
        if (facts := FACTS[spec.strategy]).one_rank == one_rank and not facts.whole_node
    ]


def choose(options: list[Option]) -> Option | None:
    """The one to take: of those that split the batch and fit, the one that sends least.

    Ranks that split the batch do all work at once, so those come first. Of equals it is the
    first, as the table of strategies has the simpler ones before.
    """
    fitting = [o for o in options if o.fits]
    first = [o for o in fitting if not o.splits_model]
    if first:
        return min(first, key=lambda o: float(f"{o.seconds:.9g}"))
    return min(fitting, key=lambda o: o.idle, default=None)


def reasons(taken: Option, options: list[Option]) -> list[str]:
    """Why this one, in words."""
    lines = []
    for other in options:
        less = other.seconds < taken.seconds
        if not (other.splits_model or other.fits) and less:
            cost = f"{_time(other)}), but needs {_gib(other)} on each GPU"
            lines.append(f"{other.label} would communicate less ({cost}")
    same = [o for o in options if o.fits and o is not taken and not o.splits_model]
    if taken.splits_model:
        lines.append(
            f"no strategy that splits the batch fits; {taken.label} splits the model, and each GPU "
            f"is idle for {taken.idle:.0%} of a step"
        )
    elif taken.label == "single":
        lines.append("one GPU: it fits, and there is no communication")
    elif same:
        lines.append(f"of those that fit it has the least communication: {_time(taken)} per step")
        spare = min(same, key=lambda o: o.footprint.total)
        if spare.footprint.total < taken.footprint.total:
            saved = (taken.footprint.total - spare.footprint.total) / GIB
            lines.append(
                f"{spare.label} would save {saved:.3g} GiB per GPU, for {_time(spare)} and "
                f"{spare.waits} waits for other GPUs per step ({taken.label}: {taken.waits})"
            )
    else:
        lines.append(
            f"no other that splits the batch fits; it communicates for {_time(taken)} per step"
        )
    return lines


def _time(option: Option) -> str:
    return duration(option.seconds)


def _gib(option: Option) -> str:
    return f"{option.footprint.total / GIB:.3g} GiB"


def command_line(spec: RunSpec, subject: Subject) -> str:
    """The line that runs it on a cluster."""
    per_node = spec.ranks_per_node
    head = f"sbatch --nodes={spec.nodes} --ntasks-per-node={per_node} --gpus-per-node={per_node}"
    own = " --model PACKAGE.MODULE:FACTORY" if subject.parameters else ""
    return f"{head} run.sh {shlex.join(spec.arguments())}{own}"
