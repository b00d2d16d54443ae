"""The training loop, readable from top to bottom; every strategy goes through it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from jobkit.payload.batches import Batches, DeviceData, Progress, Step, share
from jobkit.payload.clock import StepWindows
from jobkit.payload.device import peak_memory_mib
from jobkit.payload.distributed import Group
from jobkit.payload.recipe import predict_flipped
from jobkit.payload.report import Reporter
from jobkit.payload.strategies import Strategy
from jobkit.program.why import DATA, OWN
from jobkit.spec.runspec import RunSpec

MIN_EPOCH_S = 1.0  # of which a GPU can be measured


class Guard(Protocol):
    """Called between two iterations, on every rank at the same ones.

    edge and epoch_done may raise Stopped: then the state is saved, and the training ends.
    """

    def edge(self, trainer: "Trainer") -> None:
        """An iteration is done."""

    def epoch_done(self, trainer: "Trainer") -> None:
        """An epoch is done and recorded."""

    def alive(self) -> None:
        """The rank makes progress, within something long."""


class Observer(Protocol):
    """Measures single iterations of the training, and changes nothing in it."""

    def wants(self, trainer: "Trainer") -> bool:
        """Whether it measures the next iteration; the same on every rank."""

    def before(self, trainer: "Trainer", step: Step) -> None:
        """The iteration is next."""

    def after(self, trainer: "Trainer", step: Step) -> None:
        """It is done."""


class Clock:
    """Wall time of the timed iterations and, of it, the wait for batches.

    windows: the steps one by one, which are told of the same pauses and waits.
    """

    def __init__(self, device: torch.device, windows: StepWindows | None = None) -> None:
        self._device, self._windows = device, windows
        self._carried: tuple[int, float, float] = (0, 0.0, 0.0)
        self.restart()

    def carry(self, images: int, elapsed_s: float, data_wait_s: float) -> None:
        """Restart from the values that an earlier process measured in the same epoch."""
        self._carried = (images, elapsed_s, data_wait_s)
        self.restart()

    def so_far(self) -> tuple[int, float, float]:
        """Images, seconds, and seconds of waiting for data so far."""
        return self.images, self.elapsed_s(), self.data_wait_s

    def return_to(self, before: tuple[int, float, float]) -> None:
        """Forget what happened since a call of so_far."""
        self.images, elapsed_s, self.data_wait_s = before
        self._start = self._now() - elapsed_s

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def restart(self, windows: StepWindows | None = None) -> None:
        """Reset to the carried values and start again; windows: are told of pauses from now on."""
        self._windows = windows or self._windows
        self.images, before_s, self.data_wait_s = self._carried
        self._end: float | None = None
        self._start = self._now() - before_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens inside, such as the writing of a checkpoint."""
        begin = self._now()
        if self._windows:
            self._windows.pause()
        yield
        if self._windows:
            self._windows.resume()
        self._start += self._now() - begin

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude an iteration that happens inside: its time, images and wait for data."""
        images, waited = self.images, self.data_wait_s
        if self._windows:
            self._windows.skip()
        with self.paused():
            yield
        self.images, self.data_wait_s = images, waited

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count what happens inside as wait for data; the device is not synchronised here."""
        start = time.perf_counter()
        with self._windows.span(DATA) if self._windows else nullcontext():
            yield
        waited_s = time.perf_counter() - start
        self.data_wait_s += waited_s
        if self._windows:
            self._windows.waited(waited_s)

    def own_s(self) -> float:
        """Seconds since the last restart, without those of an earlier process."""
        return self.elapsed_s() - self._carried[1]

    def stop(self) -> None:
        """End the measurement once the device has done all its work."""
        self._end = self._now()

    def elapsed_s(self) -> float:
        """Seconds from the start to the stop, or to now, all work on the device included."""
        return (self._now() if self._end is None else self._end) - self._start


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
    windows: StepWindows | None = None  # the time of each step

    def __post_init__(self) -> None:
        # Of the epoch in progress: this rank's sum of losses, and its time.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.data.device)
        self.clock = Clock(self.data.device)
        self.begun = False  # this process has made an iteration
        self._short_told = False
        self._seen: set[int] = set()  # sizes of the global batch
        self.peak_lr = peak_lr(self.spec)

    def train(self, started: Callable[[float | None], None]) -> tuple[float, float]:
        """Train for all steps left; return the final validation loss and accuracy (0 to 1).

        started is called when everything is ready, with None, unless the first iteration compiles
        the model (--compile), and after the first iteration, with the seconds that it took.
        """
        warmup = self._warmup(self.progress.position)
        self.windows = StepWindows(
            self.report, self.group.place, warmup, self.strategy.devices, self.spec.why
        )
        if not self.spec.compile:
            started(None)
        validation = None
        while not self.finished:
            validation = self._epoch(self.progress.epoch, started)
            # An epoch that --max-steps cut short may be continued from the last checkpoint.
            if self.progress.position == self.batches.samples:
                self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
            if self.guard:
                self.guard.epoch_done(self)
        if validation is None:  # interrupted after its last epoch
            validation = means(self.group.reduce(self.evaluate(), "sum"))
        return validation

    @property
    def finished(self) -> bool:
        """Whether all epochs are trained, or the steps of --max-steps."""
        most = math.inf if self.spec.max_steps is None else self.spec.max_steps
        return self.progress.epoch >= self.spec.epochs or self.progress.iteration >= most

    @property
    def steps_left(self) -> int:
        """Optimizer steps until the training is finished."""
        return self.total_steps - self.progress.iteration

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training, at this size of the batch."""
        return total_steps(self.spec, len(self.batches))

    @property
    def epoch_over(self) -> bool:
        """Whether no step of the epoch is left: what comes is its evaluation."""
        return self.finished or self.progress.position == self.batches.samples

    def _epoch(self, epoch: int, started: Callable[[float | None], None]) -> tuple[float, float]:
        """Train and evaluate for one epoch and report it; return validation loss and accuracy."""
        begun_at = self.progress.position
        clock, loss_sum, lr = self.train_epoch(epoch, started, begun_at)
        own_s = clock.elapsed_s()
        eval_clock = Clock(self.data.device)
        val_sums = self.evaluate()
        eval_time_s = eval_clock.elapsed_s()

        peaks = peak_memory_mib(self.data.device)
        peak = peaks.allocated if self.data.device.type == "cuda" else peaks.resident
        self.report.log(
            f"epoch {epoch}, this rank: {clock.images} images in {own_s:.4f} s, of it waiting for "
            f"data {clock.data_wait_s:.4f} s; peak memory {peak:.1f} MiB"
        )
        sums = self.group.reduce(
            {"train_loss": loss_sum, "images": clock.images, **val_sums}, "sum"
        )
        largest = self.group.reduce(
            {
                "epoch_time_s": own_s,
                "eval_time_s": eval_time_s,
                "data_wait_s": clock.data_wait_s,
                "peak_memory_mib": peak,
                "allocated_memory_mib": peaks.allocated,
                "reserved_memory_mib": peaks.reserved,
                "device_memory_mib": peaks.device,
                "resident_memory_mib": peaks.resident,
            },
            "max",
        )
        self._report(epoch, sums, largest, lr, begun_at)
        return means(sums)

    def _report(
        self,
        epoch: int,
        sums: Mapping[str, float],
        largest: Mapping[str, float],
        lr: float,
        begun_at: int,
    ) -> None:
        """Record and print the epoch, from the sums and maxima over the ranks."""
        train_loss = sums["train_loss"] / self.progress.position
        val_loss, val_accuracy = means(sums)
        images_per_s = sums["images"] / largest["epoch_time_s"]
        self.report.record(
            "epoch",
            epoch=epoch,
            iterations=-(-self.progress.position // self.batches.batch_size),
            train_loss=train_loss,
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            timed_images=int(sums["images"]),
            images_per_s=images_per_s,
            lr=lr,
            begun_at=begun_at,
            **largest,
        )
        epoch_s = largest["epoch_time_s"]
        if self.data.device.type == "cuda" and epoch_s < MIN_EPOCH_S and not self._short_told:
            self._short_told = True
            self.report.warn(
                f"an epoch takes {epoch_s:.2f} s: so short, it measures the host that issues the "
                "operations rather than the GPU; use a larger model, batch or data set"
            )
        self.report.say(
            f"epoch {epoch + 1}/{self.spec.epochs}: loss {train_loss:.4f}, "
            f"validation loss {val_loss:.4f}, accuracy {val_accuracy:.1%}, "
            f"{largest['epoch_time_s']:.2f} s, {images_per_s:,.0f} images/s"
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
            self.clock = Clock(self.data.device, self.windows)
        else:
            self.clock.restart(self.windows)
        if self.windows:
            self.windows.begin_epoch(epoch, self.clock)
        warmup, lr = self._warmup(position), 0.0
        steps = self.batches.epoch(epoch, position, self.data.device)
        for i, step in enumerate(self.data.cropped_ahead(steps, epoch)):
            if i == warmup > 0:
                self.clock.restart()
            with self._observed(step, after_warmup=i >= warmup):
                lr = self._set_rate()
                with self._timed(step):
                    self.loss_sum += self._train_step(step, epoch, self.clock)
                self.progress.position += step.global_count
                self.progress.iteration += 1
                if self.windows:
                    images = sum(map(len, step.micro_batches)) * self.strategy.owns_loss
                    self.windows.step(images, {})
                if not self.begun:
                    started(self.clock.own_s())
                self.begun = True
                if self.guard:
                    with self.windows.span(OWN) if self.windows else nullcontext():
                        self.guard.edge(self)
            if self.finished:
                break
        if self.windows:
            self.windows.end_epoch()
        self.clock.stop()  # the device is idle now: the sum can be read
        return self.clock, self.loss_sum.item(), lr

    def _timed(self, step: Step) -> AbstractContextManager[None]:
        """Exclude an iteration in which a new size of the batch costs time once and for all.

        The model is compiled for it, or cuDNN tries its kernels.
        """
        searches = self.data.device.type == "cuda" and torch.backends.cudnn.benchmark
        new = (self.spec.compile or searches) and step.global_count not in self._seen
        self._seen.add(step.global_count)
        # The first one of all is excluded as the warm-up is; and something must be timed.
        return self.clock.excluded() if new and self.begun and self.clock.images else nullcontext()

    @contextmanager
    def _observed(self, step: Step, after_warmup: bool) -> Iterator[None]:
        """Have the observers that want this iteration measure it."""
        active = [observer for observer in self.observers if after_warmup and observer.wants(self)]
        for observer in active:
            observer.before(self, step)
        yield
        for observer in active:
            observer.after(self, step)

    def _warmup(self, position: int) -> int:
        """Iterations of the epoch that are not timed, as they are this process's first ones.

        At least one is timed, however few the epoch has.
        """
        if self.begun:
            return 0
        left = -(-(self.batches.samples - position) // self.batches.batch_size)
        if self.spec.max_steps is not None:
            left = min(left, self.spec.max_steps - self.progress.iteration)
        return max(0, min(self.spec.warmup_iterations, left - 1))

    def _set_rate(self) -> float:
        """Give the optimizer the learning rate of the next iteration."""
        done = self.progress.position / self.batches.batch_size
        per_epoch = len(self.batches)
        at = self.progress.epoch * per_epoch + done
        lr = learning_rate(self.spec, at, per_epoch, self.peak_lr)
        for group in self.optimizer.param_groups:
            trains = self.progress.epoch < group.get("last_epoch", math.inf)
            group["lr"] = lr * group.get("lr_factor", 1.0) * trains
        return lr

    def _train_step(self, step: Step, epoch: int, clock: Clock) -> torch.Tensor:
        """One optimizer step over the global batch; returns the sum of this rank's losses."""
        # The strategies average gradients over the ranks that have different samples: this makes
        # it the mean over the samples.
        weight = self.strategy.data_world_size / step.global_count
        losses = torch.zeros((), dtype=torch.float64, device=self.data.device)
        for j, indices in enumerate(step.micro_batches):
            with clock.waiting_for_data():
                images, labels = self.data.training_batch(indices, epoch, step.crops_of(j))
            last = j == len(step.micro_batches) - 1
            losses += self.strategy.forward_backward(images, labels, weight, last)
            clock.images += len(indices) * self.strategy.owns_loss
        self.strategy.optimizer_step(self.optimizer)
        return losses

    def evaluate(self) -> dict[str, float]:
        """This rank's sums over its test samples: val_loss, val_correct, val_samples.

        Every sample once over all ranks; each rank calls the model as often as the others.
        """
        strategy, data = self.strategy, self.data
        strategy.model.eval()
        strategy.share_buffers()
        rank, ranks = strategy.data_rank, strategy.data_world_size
        count, chunk = len(data.test.labels), self.spec.eval_batch_size * ranks
        sums = torch.zeros(2, dtype=torch.float64, device=data.device)
        seen = 0
        for start in range(0, count, chunk):
            mine = share(min(chunk, count - start), rank, ranks)
            size = mine.stop - mine.start
            # A rank with nothing left takes part with one sample that is not counted.
            part = slice(start + mine.start, start + mine.stop) if size else slice(0, 1)
            images, labels = data.test_batch(part)
            if self.spec.speed_run:
                logits = predict_flipped(strategy.predict, images)
            else:
                logits = strategy.predict(images)
            if self.guard:
                self.guard.alive()
            if size and strategy.owns_loss:
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
                seen += size
        loss, correct = sums.tolist()
        return {"val_loss": loss, "val_correct": correct, "val_samples": float(seen)}


def means(sums: Mapping[str, float]) -> tuple[float, float]:
    """Validation loss and accuracy of the sums over all ranks that evaluate gives."""
    return sums["val_loss"] / sums["val_samples"], sums["val_correct"] / sums["val_samples"]


# The learning rate: where it rises, as a share of the training; and of the peak, where that of the
# speed run begins and ends.
_RISE = {"onecycle": 0.25, "speed run": 0.23}
_FIRST, _LAST = 0.2, 0.07


def peak_lr(spec: RunSpec) -> float:
    """The highest learning rate: --lr, scaled by the global batch (Goyal et al., 2017)."""
    factor = spec.steps_batch_size / spec.lr_base_batch_size
    return spec.lr * {"none": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}[spec.lr_scaling]


def learning_rate(spec: RunSpec, step: float, steps_per_epoch: int, peak: float) -> float:
    """The learning rate of a step, counted from 0 over the whole training.

    A training resumed with another batch size may be between two steps.

    onecycle rises and falls linearly, ending near 0; the speed run does so between 20 % and 7 % of
    the peak (Keller Jordan, arXiv 2404.00498); cosine falls as half a cosine.
    """
    kind = "speed run" if spec.speed_run else spec.lr_schedule
    total = total_steps(spec, steps_per_epoch)
    warmup = min(_RISE.get(kind, 0.0) * total, total - 1)
    if step < warmup:
        if kind == "speed run":
            return peak * (_FIRST + (1 - _FIRST) * step / warmup)
        return peak * (step + 1) / (warmup + 1)
    left = (total - step) / max(total - warmup, 1)
    if kind == "onecycle":
        return peak * left
    if kind == "speed run":
        return peak * (_LAST + (1 - _LAST) * left)
    if kind == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return peak


def total_steps(spec: RunSpec, steps_per_epoch: int) -> int:
    """The steps of the whole training: those of all epochs, or of --max-steps if that is less."""
    steps = spec.epochs * steps_per_epoch
    return steps if spec.max_steps is None else min(steps, spec.max_steps)
