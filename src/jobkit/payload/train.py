"""The training loop, readable from top to bottom; every strategy goes through it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from jobkit.payload.clock import Clock
from jobkit.payload.data.batches import Batches, DeviceData, Step, share
from jobkit.payload.distributed import Group
from jobkit.payload.host import peak_memory_mib
from jobkit.payload.memory import MIB, Share, held
from jobkit.payload.progress import Progress
from jobkit.payload.report import Reporter
from jobkit.payload.schedule import learning_rate
from jobkit.payload.strategies import Strategy
from jobkit.spec.runspec import RunSpec


class Guard(Protocol):
    """What is asked between two iterations; every rank asks at the same ones.

    edge and epoch_done may raise Stopped: the state is saved then, and the training ends.
    """

    def edge(self, trainer: "Trainer") -> None:
        """An iteration is done."""

    def epoch_done(self, trainer: "Trainer") -> None:
        """An epoch is done and recorded."""

    def alive(self, where: str) -> None:
        """The rank goes on, in the middle of something long."""

    def may_record(self) -> None:
        """Raise where the run's records are another attempt's to write by now."""


class Observer(Protocol):
    """Looks at single iterations of the training, and changes nothing in it."""

    def wants(self, trainer: "Trainer") -> bool:
        """Whether it looks at the next iteration; the same on every rank."""

    def before(self, trainer: "Trainer", step: Step) -> None:
        """The iteration is next."""

    def after(self, trainer: "Trainer", step: Step) -> None:
        """It is done."""


@dataclass
class Trainer:
    """Everything that one rank trains with."""

    spec: RunSpec
    group: Group
    data: DeviceData
    batches: Batches
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    report: Reporter
    classes: int
    progress: Progress = field(default_factory=Progress)
    guard: Guard | None = None
    observers: Sequence[Observer] = ()  # of iterations after the warm-up
    held: Share | None = None  # what the rank's tensors take, once the first step was made

    def __post_init__(self) -> None:
        # Of the epoch in progress: this rank's sum of losses, and its time.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.data.device)
        self.clock = Clock(self.data.device)
        self._begun = False  # this process has made an iteration

    def train(self, started: Callable[[float | None], None]) -> tuple[float, float]:
        """Train for all epochs left; return the final validation loss and accuracy (0 to 1).

        started is called once, when everything is ready: before the first iteration, and with
        None; but with --compile after it, with the seconds that it took, as it compiles the model.
        """
        self.optimizer.register_step_post_hook(self._measure_held)
        if not self.spec.compile:
            started(None)
        validation = None
        while self.progress.epoch < self.spec.epochs:
            validation = self._epoch(self.progress.epoch, started)
            self.progress.next_epoch()
            if self.guard:
                self.guard.epoch_done(self)
        if validation is None:  # it was cut after its last epoch
            sums = self.group.reduce(self.evaluate(), "sum")
            validation = (sums[0] / sums[2], sums[1] / sums[2])
        return validation

    def _measure_held(self, *_: Any) -> None:
        """After the first step, while its gradients are there: once."""
        if self.held is None:
            self.held = held(self.strategy.model, self.optimizer)
            self.report.log(f"memory held by this rank: {self.held.describe()}")

    def _epoch(self, epoch: int, started: Callable[[float | None], None]) -> tuple[float, float]:
        """Train and evaluate once, and report it; return validation loss and accuracy."""
        begun_at = self.progress.position
        clock, loss_sum, lr = self.train_epoch(epoch, started, begun_at)
        own_s = clock.elapsed_s()
        eval_clock = Clock(self.data.device)
        val_sums = self.evaluate()
        eval_time_s = eval_clock.elapsed_s()

        peaks = peak_memory_mib(self.data.device)
        peak = peaks.allocated if self.data.device.type == "cuda" else peaks.resident
        own = self.held.total / MIB if self.held else float("nan")
        memory = (peak, *peaks, own)
        self.report.log(
            f"epoch {epoch}, this rank: {clock.images} images in {own_s:.4f} s, of it waiting for "
            f"data {clock.data_wait_s:.4f} s; peak memory {peak:.1f} MiB"
        )
        sums = self.group.reduce([loss_sum, clock.images, *val_sums], "sum")
        worst = self.group.reduce([own_s, eval_time_s, clock.data_wait_s, *memory], "max")
        self._report(epoch, sums, worst, lr, begun_at)
        return sums[2] / sums[4], sums[3] / sums[4]

    def _report(
        self, epoch: int, sums: list[float], worst: list[float], lr: float, begun_at: int
    ) -> None:
        """Record the epoch, from the ranks' sums and from the worst of them, and say it."""
        if self.guard:
            self.guard.may_record()
        train_loss = sums[0] / self.batches.samples
        val_loss, val_accuracy = sums[2] / sums[4], sums[3] / sums[4]
        self.report.record(
            "epoch",
            epoch=epoch,
            iterations=len(self.batches),
            train_loss=train_loss,
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            epoch_time_s=worst[0],
            timed_images=int(sums[1]),
            images_per_s=sums[1] / worst[0],
            eval_time_s=worst[1],
            data_wait_s=worst[2],
            peak_memory_mib=worst[3],
            allocated_memory_mib=worst[4],
            reserved_memory_mib=worst[5],
            resident_memory_mib=worst[6],
            held_memory_mib=worst[7],
            lr=lr,
            begun_at=begun_at,
        )
        self.report.say(
            f"epoch {epoch + 1}/{self.spec.epochs}: loss {train_loss:.4f}, "
            f"validation loss {val_loss:.4f}, accuracy {val_accuracy:.1%}, "
            f"{worst[0]:.2f} s, {sums[1] / worst[0]:,.0f} images/s"
        )

    def train_epoch(
        self, epoch: int, started: Callable[[float | None], None], position: int = 0
    ) -> tuple[Clock, float, float]:
        """Train for one epoch; return its clock, the sum of this rank's losses, the last rate.

        position: samples of the epoch that an earlier process has trained on. What it measured is
        in the clock and the sum already.
        """
        self.strategy.model.train()
        self.progress.epoch, self.progress.position = epoch, position
        if position == 0:
            self.loss_sum.zero_()
            self.clock = Clock(self.data.device)
        else:
            self.clock.restart()
        warmup, lr = self._warmup(position), 0.0
        for i, step in enumerate(self.batches.epoch(epoch, position)):
            if i == warmup > 0:
                self.clock.restart()
            with self._observed(step, after_warmup=i >= warmup):
                lr = self._set_rate()
                self.loss_sum += self._train_step(step, epoch, self.clock)
                self.progress.step(step.global_count)
                if self.spec.compile and not self._begun:
                    started(self.clock.elapsed_s())
                self._begun = True
                if self.guard:
                    self.guard.edge(self)
        self.clock.stop()  # the device is idle now: the sum can be read
        return self.clock, self.loss_sum.item(), lr

    @contextmanager
    def _observed(self, step: Step, after_warmup: bool) -> Iterator[None]:
        """Have those who look at single iterations see one."""
        looking = [each for each in self.observers if after_warmup and each.wants(self)]
        for each in looking:
            each.before(self, step)
        yield
        for each in looking:
            each.after(self, step)

    def _warmup(self, position: int) -> int:
        """Iterations of the epoch that are not timed, as they are this process's first ones.

        At least one is timed, however few the epoch has.
        """
        if self._begun:
            return 0
        left = -(-(self.batches.samples - position) // self.batches.batch_size)
        return max(0, min(self.spec.warmup_iterations, left - 1))

    def _set_rate(self) -> float:
        """Give the optimizer the learning rate of the next iteration."""
        done = self.progress.position / self.batches.batch_size
        per_epoch = len(self.batches)
        lr = learning_rate(self.spec, self.progress.epoch * per_epoch + done, per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _train_step(self, step: Step, epoch: int, clock: Clock) -> torch.Tensor:
        """One optimizer step over the global batch; returns the sum of this rank's losses."""
        # The strategies average gradients over the ranks that have different samples: this makes
        # it the mean over the samples.
        weight = self.strategy.data_world_size / step.global_count
        losses = torch.zeros((), dtype=torch.float64, device=self.data.device)
        for j, indices in enumerate(step.micro_batches):
            with clock.waiting_for_data():
                images, labels = self.data.training_batch(indices, epoch)
            last = j == len(step.micro_batches) - 1
            with self.strategy.stopwatch.part("passes"):
                losses += self.strategy.forward_backward(images, labels, weight, last)
            clock.images += len(indices) * self.strategy.counts
        with self.strategy.stopwatch.part("step"):
            self.strategy.optimizer_step(self.optimizer)
        return losses

    def evaluate(self) -> list[float]:
        """This rank's sums over its test samples: losses, correct answers, samples.

        Every sample once over all ranks; each rank calls the model as often as the others.
        """
        self.strategy.model.eval()
        self.strategy.share_buffers()
        rank, ranks = self.strategy.data_rank, self.strategy.data_world_size
        count = len(self.data.test.labels)
        chunk = self.spec.eval_batch_size * ranks
        sums = torch.zeros(2, dtype=torch.float64, device=self.data.device)
        seen = 0
        for start in range(0, count, chunk):
            mine = share(min(chunk, count - start), rank, ranks)
            size = mine.stop - mine.start
            # A rank with nothing left takes part with one sample that is not counted.
            part = slice(start + mine.start, start + mine.start + size) if size else slice(0, 1)
            images, labels = self.data.test_batch(part)
            logits = self.strategy.predict(images)
            if self.guard:
                self.guard.alive("evaluation")
            if size and self.strategy.counts:
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
                seen += size
        return [*sums.tolist(), float(seen)]
