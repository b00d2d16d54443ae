"""The ranks of `verify`: train by the real loop, record every step, compare with one process."""

import itertools
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from jobkit.checks.verify.cases import CLASSES, DTYPES, Case, hold_still
from jobkit.data.images import synthetic
from jobkit.payload.batches import Step
from jobkit.payload.device import configure
from jobkit.payload.distributed import Group
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.payload.run import build_trainer
from jobkit.payload.train import Trainer
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS

Inject = Callable[[Trainer], None]  # a fault for the check to find
# What a training did, step by step: losses (the mean over each global batch), gradients and
# parameters by name, and of each evaluation the right answers and the samples.
Trace = dict[str, list[Any]]


@dataclass
class Difference:
    """How far a case is from single: the largest relative differences over steps and ranks."""

    case: Case
    world_size: int
    dtype: str
    loss: float
    gradient: float
    parameter: float
    evaluation: float  # samples or answers more or less

    @property
    def tolerance(self) -> float:
        """Of the first three."""
        return self.case.tolerance(self.dtype)

    @property
    def ok(self) -> bool:
        """Whether all is within the tolerance; nan is not."""
        near = all(d <= self.tolerance for d in (self.loss, self.gradient, self.parameter))
        return near and (self.evaluation == 0 or self.case.variant.within is not None)


def trace(
    spec: RunSpec, group: Group, dtype: torch.dtype, inject: Inject | None, num_classes: int
) -> Trace:
    """Train as spec says, by the loop that every job runs, and record each step."""
    data = synthetic(spec.train_samples or 0, spec.test_samples or 0, num_classes)
    report = Reporter(None, 0, 1)  # as a rank that prints nothing, and has no file to close
    trainer = build_trainer(spec, group, data, report, dtype)
    steps: Trace = {"losses": [], "gradients": [], "parameters": [], "evaluations": []}
    strategy, loss_before = trainer.strategy, 0.0
    hold_still(strategy.model)

    def before(trainer: Trainer, step: Step) -> None:
        nonlocal loss_before
        loss_before = trainer.loss_sum.item()

    def after(trainer: Trainer, step: Step) -> None:
        loss = trainer.loss_sum.item() - loss_before
        total = group.reduce({"loss": loss}, "sum")["loss"]
        steps["losses"].append(total / step.global_count)
        steps["parameters"].append(strategy.whole())

    trainer.before_step, trainer.after_step = [before], [after]
    # Those that the optimizer takes: reduced over the ranks, and clipped where wanted.
    trainer.optimizer.register_step_pre_hook(
        lambda *_: steps["gradients"].append(strategy.whole(gradients=True))
    )
    if inject is not None:
        inject(trainer)
    for epoch in range(spec.epochs):
        trainer.train_epoch(epoch)
        sums = group.reduce(trainer.evaluate(), "sum")
        steps["losses"].append(sums["val_loss"] / sums["val_samples"])
        steps["evaluations"] += [sums["val_correct"], sums["val_samples"]]
    return steps


def worst(values: Sequence[float]) -> float:
    """The largest value, or nan where there is one."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def largest(
    tensors: Sequence[Mapping[str, Tensor]], reference: Sequence[Mapping[str, Tensor]]
) -> float:
    """The largest difference of a tensor, over the largest value of the reference."""
    off = [0.0]
    for step, right in zip(tensors, reference, strict=True):
        if step.keys() != right.keys():
            return math.inf
        for name, tensor in right.items():
            scale = tensor.abs().max().clamp_min(torch.finfo(tensor.dtype).tiny)
            off.append(((step[name] - tensor).abs().max() / scale).item())
    return worst(off)


def compare(steps: Trace, reference: Trace) -> list[float]:
    """Largest differences: of losses, gradients, parameters (relative) and of the evaluation."""
    pairs = zip(steps["losses"], reference["losses"], strict=True)
    counts = zip(steps["evaluations"], reference["evaluations"], strict=True)
    return [
        worst([abs(a - b) / abs(b) for a, b in pairs]),
        largest(steps["gradients"], reference["gradients"]),
        largest(steps["parameters"], reference["parameters"]),
        worst([abs(a - b) for a, b in counts]),
    ]


@dataclass(frozen=True)
class Orders:
    """What the ranks of one group are to do."""

    folder: Path  # shared by all ranks of all groups
    cases: Sequence[Case]
    dtypes: Sequence[str]
    device: str  # cpu, or cuda: a GPU for each rank
    classes: int
    inject: Inject | None = None
    is_reference: bool = False  # make the runs that the cases are compared with

    def reference(self, case: Case, dtype: str) -> Path:
        """The trace of the single run that a case is compared with."""
        return self.folder / f"{case.single().run_id}-{dtype}.pt"


def be_rank(rank: int, world: int, orders: Orders) -> None:
    """Do the orders as one rank; rank 0 writes the differences."""
    torch.set_num_threads(1)
    place = RankEnv(rank=rank, local_rank=rank, world_size=world, local_world_size=world)
    # A file needs no free port.
    store = dist.FileStore(str(orders.folder / f"store-{world}"), world) if world > 1 else None
    label, device = "the start", torch.device("cpu")
    try:
        if orders.device == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            configure(RunSpec(fp32="ieee"), device)
        group, found = Group(place, device, 60.0, store), []
        for case, name in itertools.product(orders.cases, orders.dtypes):
            label, path = case.variant.label, orders.reference(case, name)
            if orders.is_reference:
                if not path.exists():
                    steps = trace(case.single(), group, DTYPES[name], None, orders.classes)
                    torch.save(steps, path)
                continue
            steps = trace(case.spec(world), group, DTYPES[name], orders.inject, orders.classes)
            off = group.gather(compare(steps, torch.load(path, weights_only=True)))
            found.append([worst(column) for column in zip(*off, strict=True)])
        if rank == 0:
            torch.save(found, orders.folder / f"found-{world}.pt")
        group.close()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RuntimeError(f"{label}, {world} ranks: {reason}") from error
    os._exit(0)  # a sharded model keeps threads alive that a tidy end would trip over


# --- the process that starts them -----------------------------------------------------------------

_LIMIT_S = 300.0
_PRELOAD = ("jobkit.checks.verify.rank", "torch._dynamo")


def verify(
    plans: Mapping[int, Sequence[Case]],
    inject: Inject | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    device: str = "cpu",
    classes: int = CLASSES,
) -> list[Difference]:
    """Run the cases of each world size on processes of their own; return all differences.

    dtypes: of float64 and float32. device: cpu, or cuda for a GPU for each rank. inject is called
    with each trainer that is compared, to put a fault in. Raises RuntimeError when a rank fails.
    """
    every = list({case.variant.label: case for cases in plans.values() for case in cases}.values())
    # The process from which ranks are forked imports what they need, once for all.
    code = {FACTS[case.strategy].code.split(".")[0] for case in every}
    modules = [f"jobkit.payload.strategies.{module}" for module in sorted(code)]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *modules])
    differences: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="jobkit-verify-") as name:
        orders = Orders(Path(name), every, dtypes, device, classes, is_reference=True)
        _run(1, orders)  # one process makes the references of all of them first
        for world, cases in plans.items():
            if cases:
                _run(world, replace(orders, cases=cases, inject=inject, is_reference=False))
                found = torch.load(orders.folder / f"found-{world}.pt")
                pairs = zip(itertools.product(cases, dtypes), found, strict=True)
                differences += [Difference(case, world, d, *off) for (case, d), off in pairs]
    return differences


def _run(world: int, orders: Orders) -> None:
    """Start the ranks and wait for them; when one fails, end the others and raise its reason."""
    # Ranks are forked from a process that has imported torch and never computes: a fork of this
    # one could miss threads, and a fresh start takes seconds for each.
    ranks = start_processes(be_rank, (world, orders), world, join=False, start_method="forkserver")
    deadline = time.monotonic() + _LIMIT_S
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise RuntimeError(f"{world} ranks did not end within {_LIMIT_S:g} s")
    except ProcessException as error:  # its text is a traceback, which ends with the reason
        raise RuntimeError(str(error).strip().splitlines()[-1]) from None


def table(differences: Sequence[Difference]) -> list[str]:
    """The differences for a reader, one line each, and a verdict."""
    head = ["strategy", "ranks", "dtype", "loss", "gradient", "parameter", "evaluation"]
    rows = [[*head, "tolerance", ""]]
    for d in differences:
        numbers = [d.loss, d.gradient, d.parameter, d.evaluation, d.tolerance]
        texts = [f"{x:.1e}" if math.isfinite(x) and x else f"{x:g}" for x in numbers]
        rows.append(
            [d.case.variant.label, f"{d.world_size}", d.dtype, *texts, "ok" if d.ok else "OVER"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    over, all_ = sum(not d.ok for d in differences), len(differences)
    return [*lines, "", f"{over} of {all_} over the tolerance" if over else "all are within it"]
