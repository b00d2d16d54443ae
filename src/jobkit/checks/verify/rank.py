"""One rank of `verify`: train by the real loop, record every step, compare with one process."""

import contextlib
import dataclasses
import itertools
import json
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from jobkit.checks.verify.cases import CLASSES, DTYPES, Case
from jobkit.payload.batches import Step
from jobkit.payload.data import synthetic
from jobkit.payload.device import configure
from jobkit.payload.distributed import Group
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.payload.run import build_trainer
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec

Inject = Callable[[Trainer], None]  # a fault for the check to find
Tensors = list[dict[str, Tensor]]


@dataclass
class Trace:
    """What a training did, step by step."""

    losses: list[float] = field(default_factory=list)  # the mean over each global batch
    gradients: Tensors = field(default_factory=list)
    parameters: Tensors = field(default_factory=list)
    evaluations: list[tuple[float, float]] = field(default_factory=list)  # right answers, samples


@dataclass
class Difference:
    """How far a case is from single: the largest relative differences over steps and ranks."""

    case: str
    strategy: str
    world_size: int
    dtype: str
    loss: float
    gradient: float
    parameter: float
    evaluation: float  # samples or answers more or less
    tolerance: float
    exact: bool

    @property
    def ok(self) -> bool:
        """Whether all is within the tolerance; nan is not."""
        near = all(d <= self.tolerance for d in (self.loss, self.gradient, self.parameter))
        return near and (self.evaluation == 0 or not self.exact)


class Recorder:
    """An observer that keeps each step's loss, gradients and new parameters in a trace."""

    def __init__(self, trainer: Trainer, found: Trace) -> None:
        self._trainer, self._found, self._sum_before = trainer, found, 0.0
        trainer.optimizer.register_step_pre_hook(self._keep_gradients)

    def wants(self, trainer: Trainer) -> bool:
        """Every step."""
        return True

    def before(self, trainer: Trainer, step: Step) -> None:
        """See Observer."""
        self._sum_before = trainer.loss_sum.item()

    def _keep_gradients(self, *_: object) -> None:
        """Those that the optimizer takes: reduced over the ranks, and clipped where wanted."""
        self._found.gradients.append(self._trainer.strategy.whole(gradients=True))

    def after(self, trainer: Trainer, step: Step) -> None:
        """See Observer."""
        own = trainer.loss_sum.item() - self._sum_before
        total = trainer.group.reduce({"loss": own}, "sum")["loss"]
        self._found.losses.append(total / step.global_count)
        self._found.parameters.append(trainer.strategy.whole())


def trace(
    spec: RunSpec,
    group: Group,
    dtype: torch.dtype,
    inject: Inject | None = None,
    num_classes: int = CLASSES,
) -> Trace:
    """Train as spec says, by the loop that every job runs, and record each step."""
    data = synthetic(spec.train_samples or 0, spec.test_samples or 0, num_classes)
    report = Reporter(None, 0, 1)  # as a rank that prints nothing
    trainer = build_trainer(spec, group, data, report, dtype)
    found = Trace()
    hold_still(trainer.strategy.model)
    trainer.observers = [Recorder(trainer, found)]
    if inject is not None:
        inject(trainer)
    for epoch in range(spec.epochs):
        trainer.train_epoch(epoch, lambda _: None)
        sums = group.reduce(trainer.evaluate(), "sum")
        found.losses.append(sums["val_loss"] / sums["val_samples"])
        found.evaluations.append((sums["val_correct"], sums["val_samples"]))
    report.close()
    return found


def hold_still(model: nn.Module) -> list[str]:
    """Keep modules that differ between ranks by design out of training; return their classes.

    Batch normalisation has the statistics of each rank's own samples, and dropout its own draw:
    both compute as in an evaluation.
    """
    held = [m for m in model.modules() if isinstance(m, _BatchNorm | _DropoutNd)]
    for module in held:
        module.eval()
        module.train = lambda mode=True, own=module: own  # type: ignore[method-assign]
    return sorted({type(module).__name__ for module in held})


def largest(found: Tensors, reference: Tensors) -> float:
    """The largest difference of a tensor, over the largest value of the reference."""
    worst = 0.0
    for one, right in zip(found, reference, strict=True):
        if one.keys() != right.keys():
            return float("inf")
        for name, tensor in right.items():
            scale = tensor.abs().max().clamp_min(torch.finfo(tensor.dtype).tiny)
            off = ((one[name] - tensor).abs().max() / scale).item()
            worst = off if off != off else max(worst, off)
            if worst != worst:
                return worst
    return worst


def compare(found: Trace, reference: Trace) -> list[float]:
    """Largest differences: of losses, gradients, parameters (relative) and of the evaluation."""
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, reference.losses, strict=True)]
    pairs = zip(found.evaluations, reference.evaluations, strict=True)
    counts = [abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)]
    return [
        max(losses) if all(x == x for x in losses) else float("nan"),
        largest(found.gradients, reference.gradients),
        largest(found.parameters, reference.parameters),
        max(counts),
    ]


@dataclass(frozen=True)
class Orders:
    """What the ranks of one group are to do."""

    folder: Path  # shared by all ranks of all groups
    dtypes: tuple[str, ...]
    cases: Sequence[Case] = ()
    singles: Sequence[Case] = ()  # whose single runs are to be made
    inject: Inject | None = None
    device: str = "cpu"  # or cuda: a GPU for each rank
    classes: int = CLASSES

    def reference(self, case: Case, dtype: str) -> Path:
        """The trace of the single run that a case is compared with."""
        return self.folder / f"{case.reference}-{dtype}.pt"


def make_references(orders: Orders, group: Group) -> None:
    """Run single for each way of training, once, and keep its trace."""
    for case, name in itertools.product(orders.singles, orders.dtypes):
        path = orders.reference(case, name)
        if not path.exists():
            made = trace(case.single(), group, DTYPES[name], num_classes=orders.classes)
            torch.save(dataclasses.asdict(made), path)


def check(case: Case, name: str, group: Group, orders: Orders) -> Difference:
    """Compare a case with single in a dtype. Every rank compares what it has itself."""
    path = orders.reference(case, name)
    reference = Trace(**torch.load(path, weights_only=True))
    world = group.place.world_size
    made = trace(case.spec(world), group, DTYPES[name], orders.inject, orders.classes)
    off = compare(made, reference)
    loss, gradient, parameter, evaluation = (
        max(column, key=_badness) for column in zip(*group.gather(off), strict=True)
    )
    return Difference(
        case=case.label,
        strategy=case.strategy,
        world_size=world,
        dtype=name,
        loss=loss,
        gradient=gradient,
        parameter=parameter,
        evaluation=evaluation,
        tolerance=case.tolerance[name],
        exact=case.exact,
    )


def _badness(value: float) -> float:
    return float("inf") if value != value else value


def _device(kind: str, rank: int) -> torch.device:
    """The rank's device; on a GPU fp32 is IEEE's."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, rank)
    torch.cuda.set_device(device)
    configure(RunSpec(fp32="ieee"), device)
    return device


def be_rank(rank: int, world: int, port: int, orders: Orders) -> None:
    """Do the orders as one rank; rank 0 writes the differences, a failing rank its reason."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    place = RankEnv(
        rank=rank, local_rank=rank, world_size=world, local_world_size=world, master_port=port
    )
    label = "the start"
    try:
        group = Group(place, _device(orders.device, rank), 60.0)
        make_references(orders, group)
        made = []
        for case, name in itertools.product(orders.cases, orders.dtypes):
            label = case.label
            made.append(dataclasses.asdict(check(case, name, group, orders)))
        if rank == 0:
            (orders.folder / f"found-{world}.json").write_text(json.dumps(made))
        group.close()
    except Exception:
        # The first rank to fail has the cause; the others fail because of it.
        with contextlib.suppress(FileExistsError), (orders.folder / "failed").open("x") as out:
            out.write(f"{label}, {world} ranks: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # a sharded model keeps threads alive that a tidy end would trip over
