"""The ranks of `verify`: train by the real loop, record every step, compare with one process."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from jobkit.checks.verify.cases import CLASSES, DTYPES, Case, hold_still
from jobkit.payload.batches import Step
from jobkit.payload.data import synthetic
from jobkit.payload.device import configure
from jobkit.payload.distributed import Group
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.payload.run import build_trainer
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS

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

    def __init__(self, trainer: Trainer, steps: Trace) -> None:
        self._trainer, self._steps, self._sum_before = trainer, steps, 0.0
        trainer.optimizer.register_step_pre_hook(self._keep_gradients)

    def wants(self, trainer: Trainer) -> bool:
        """Every step."""
        return True

    def before(self, trainer: Trainer, step: Step) -> None:
        """See Observer."""
        self._sum_before = trainer.loss_sum.item()

    def _keep_gradients(self, *_: object) -> None:
        """Those that the optimizer takes: reduced over the ranks, and clipped where wanted."""
        self._steps.gradients.append(self._trainer.strategy.whole(gradients=True))

    def after(self, trainer: Trainer, step: Step) -> None:
        """See Observer."""
        loss = trainer.loss_sum.item() - self._sum_before
        total = trainer.group.reduce({"loss": loss}, "sum")["loss"]
        self._steps.losses.append(total / step.global_count)
        self._steps.parameters.append(trainer.strategy.whole())


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
    steps = Trace()
    hold_still(trainer.strategy.model)
    trainer.observers = [Recorder(trainer, steps)]
    if inject is not None:
        inject(trainer)
    for epoch in range(spec.epochs):
        trainer.train_epoch(epoch, lambda _: None)
        sums = group.reduce(trainer.evaluate(), "sum")
        steps.losses.append(sums["val_loss"] / sums["val_samples"])
        steps.evaluations.append((sums["val_correct"], sums["val_samples"]))
    report.close()
    return steps


def largest(tensors: Tensors, reference: Tensors) -> float:
    """The largest difference of a tensor, over the largest value of the reference."""
    worst = 0.0
    for step, right in zip(tensors, reference, strict=True):
        if step.keys() != right.keys():
            return float("inf")
        for name, tensor in right.items():
            scale = tensor.abs().max().clamp_min(torch.finfo(tensor.dtype).tiny)
            off = ((step[name] - tensor).abs().max() / scale).item()
            worst = off if off != off else max(worst, off)
            if worst != worst:
                return worst
    return worst


def compare(steps: Trace, reference: Trace) -> list[float]:
    """Largest differences: of losses, gradients, parameters (relative) and of the evaluation."""
    losses = [abs(a - b) / abs(b) for a, b in zip(steps.losses, reference.losses, strict=True)]
    pairs = zip(steps.evaluations, reference.evaluations, strict=True)
    counts = [abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)]
    return [
        max(losses) if all(x == x for x in losses) else float("nan"),
        largest(steps.gradients, reference.gradients),
        largest(steps.parameters, reference.parameters),
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
            steps = trace(case.single(), group, DTYPES[name], num_classes=orders.classes)
            torch.save(dataclasses.asdict(steps), path)


def check(case: Case, name: str, group: Group, orders: Orders) -> Difference:
    """Compare a case with single in a dtype. Every rank compares what it has itself."""
    path = orders.reference(case, name)
    reference = Trace(**torch.load(path, weights_only=True))
    world = group.place.world_size
    steps = trace(case.spec(world), group, DTYPES[name], orders.inject, orders.classes)
    off = compare(steps, reference)
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
    """Do the orders as one rank; rank 0 writes the differences."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    place = RankEnv(
        rank=rank, local_rank=rank, world_size=world, local_world_size=world, master_port=port
    )
    label = "the start"
    try:
        group = Group(place, _device(orders.device, rank), 60.0)
        make_references(orders, group)
        differences = []
        for case, name in itertools.product(orders.cases, orders.dtypes):
            label = case.label
            differences.append(dataclasses.asdict(check(case, name, group, orders)))
        if rank == 0:
            (orders.folder / f"found-{world}.json").write_text(json.dumps(differences))
        group.close()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RuntimeError(f"{label}, {world} ranks: {reason}") from error
    os._exit(0)  # a sharded model keeps threads alive that a tidy end would trip over


# --- the process that starts them -----------------------------------------------------------------

_LIMIT_S = 300.0
_PRELOAD = ("jobkit.checks.verify.rank", "torch._dynamo")


def verify(
    plans: dict[int, list[Case]],
    inject: Inject | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    device: str = "cpu",
    classes: int = CLASSES,
) -> list[Difference]:
    """Run the cases of each world size on processes of their own; return all differences.

    dtypes: of float64 and float32. device: cpu, or cuda for a GPU for each rank. inject is called
    with each trainer that is compared, to put a fault in. Raises RuntimeError when a rank fails.
    """
    differences: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="jobkit-verify-") as name:
        folder = Path(name)
        # One process makes the references of all of them first.
        every = list({case.label: case for cases in plans.values() for case in cases}.values())
        _preload({case.strategy for case in every})
        orders = Orders(folder, tuple(dtypes), singles=every, device=device, classes=classes)
        _run(1, orders)
        for world, cases in plans.items():
            if cases:
                _run(world, replace(orders, cases=cases, singles=(), inject=inject))
                content = json.loads((folder / f"found-{world}.json").read_text())
                differences += [Difference(**fields) for fields in content]
    return differences


def _preload(strategies: Iterable[str]) -> None:
    """Have the process from which ranks are forked import what they need, once for all."""
    code = {FACTS[name].code.split(".")[0] for name in strategies}
    modules = [f"jobkit.payload.strategies.{module}" for module in sorted(code)]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *modules])


def _run(world: int, orders: Orders) -> None:
    """Start the ranks and wait for them; when one fails, end the others and raise its reason."""
    # Ranks are forked from a process that has imported torch and never computes: a fork of this
    # one could miss threads, and a fresh start takes seconds for each.
    ranks = start_processes(
        be_rank, (world, _free_port(), orders), world, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + _LIMIT_S
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise RuntimeError(f"{world} ranks did not end within {_LIMIT_S:g} s")
    except ProcessException as error:  # its text is a traceback, which ends with the reason
        raise RuntimeError(str(error).strip().splitlines()[-1]) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(differences: Sequence[Difference]) -> list[str]:
    """The differences for a reader, one line each, and a verdict."""
    head = ["strategy", "ranks", "dtype", "loss", "gradient", "parameter", "evaluation"]
    rows = [[*head, "tolerance", ""]]
    for d in differences:
        numbers = [_short(x) for x in (d.loss, d.gradient, d.parameter, d.evaluation, d.tolerance)]
        rows.append([d.case, str(d.world_size), d.dtype, *numbers, "ok" if d.ok else "OVER"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    over = sum(not d.ok for d in differences)
    lines.append("")
    lines.append(
        f"{over} of {len(differences)} over the tolerance" if over else "all are within it"
    )
    return lines


def _short(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) and value else f"{value:g}"
