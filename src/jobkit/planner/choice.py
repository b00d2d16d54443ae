"""Which strategy fits and communicates least; where none fits, what would."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jobkit.errors import UsageError
from jobkit.planner.footprints import Footprint, Subject, footprints, strategy_of, variants
from jobkit.planner.traffic import duration, step_messages, step_s
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from jobkit.spec.traffic import Links, waits
from jobkit.units import GIB

_MOST_RANKS = 65536
_SMALLEST = "fsdp, full shard"  # of those that split the batch


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


def remedies(question: Question) -> Iterator[str]:
    """What would make it fit, each computed: a smaller batch, checkpointing, more GPUs."""
    if question.subject.parameters is None:
        yield _smaller_batch(question)
        yield _checkpointing(question)
    yield _more_nodes(question)


def _smallest(question: Question, base: RunSpec) -> Footprint | None:
    """The one that takes least of those that split the batch; None where none is applicable."""
    found, _ = footprints(base, question.subject, ["single" if base.world_size == 1 else _SMALLEST])
    return min(found, key=lambda each: each.total, default=None)


def _with_batch(base: RunSpec, images: int) -> RunSpec:
    return replace(base, global_batch_size=None, batch_size_per_rank=images, accumulate=1)


def _largest_batch(question: Question, base: RunSpec) -> int:
    """The most images on each GPU at once that fit; 0: not even one does."""

    def fits(images: int) -> bool:
        each = _smallest(question, _with_batch(base, images))
        return each is not None and each.total <= question.usable

    low, high = 0, max(1, base.steps_batch_size // base.world_size // base.accumulate)
    while low < high:  # what fits is low at least, and high at most
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _smaller_batch(question: Question) -> str:
    base = question.base
    images = _largest_batch(question, base)
    if not images:
        least = _smallest(question, _with_batch(base, 1))
        size = f" takes {least.total / GIB:.3g} GiB" if least else " is not applicable"
        return f"no smaller batch would do: even one image per GPU{size}"
    each = _smallest(question, _with_batch(base, images))
    assert each is not None
    size = f"{each.label}, {each.total / GIB:.3g} GiB"
    parts = math.ceil(base.steps_batch_size / base.world_size / images)
    split = _smallest(question, replace(base, accumulate=parts))
    same = split is not None and split.total <= question.usable
    also = f"; or the same batch in microbatches: --accumulate {parts}" if same else ""
    return f"a smaller batch: --batch-size-per-rank {images} ({size}){also}"


def _checkpointing(question: Question) -> str:
    base = question.base
    if base.activation_checkpointing:
        return "activation checkpointing is on already"
    found = _smallest(question, replace(base, activation_checkpointing=True))
    if found is None:
        return "activation checkpointing: not applicable"
    size = f"{found.label}, {found.total / GIB:.3g} GiB"
    if found.total <= question.usable:
        return f"--activation-checkpointing ({size})"
    images = _largest_batch(question, replace(base, activation_checkpointing=True))
    also = f"; with --batch-size-per-rank {images} it would" if images else ""
    return f"--activation-checkpointing alone is not enough ({size}){also}"


def _more_nodes(question: Question) -> str:
    """Twice the nodes, and again, at the same batch per GPU."""
    base = question.base
    per_rank = max(1, base.steps_batch_size // base.world_size)
    least: Footprint | None = None
    nodes = base.nodes * 2
    while nodes * base.ranks_per_node <= _MOST_RANKS:
        try:
            more = replace(base, nodes=nodes, global_batch_size=None, batch_size_per_rank=per_rank)
            least = _smallest(question, more) or least
        except UsageError:
            break
        if least and least.total <= question.usable:
            gpus = least.spec.world_size
            return (
                f"more GPUs: {gpus} on {nodes} nodes ({least.label}, {least.total / GIB:.3g} GiB)"
            )
        nodes *= 2
    size = f" ({least.total / GIB:.3g} GiB at {least.spec.world_size})" if least else ""
    return f"no number of GPUs alone would do{size}: activations and one gathered block stay"
