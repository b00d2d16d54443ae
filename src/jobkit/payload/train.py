"""The training loop, readable from top to bottom; every strategy goes through it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from jobkit.payload.batches import Batches, DeviceData, Progress, Step, share
from jobkit.payload.clock import StepWindows
from jobkit.payload.device import peak_memory_mib
from jobkit.payload.distributed import Group
from jobkit.payload.recipe import predict_flipped
from jobkit.payload.report import Reporter
from jobkit.payload.strategies import Strategy
from jobkit.program.process import synchronised_s
from jobkit.program.why import DATA, OWN
from jobkit.spec.runspec import RunSpec

Observer = Callable[["Trainer", Step], None]  # measures an iteration, and changes nothing in it


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
    progress: Progress = field(default_factory=Progress)
    guard: Any = None  # a stop.JobGuard: called between two iterations, and after an epoch
    # Called around each iteration after the warm-up, on every rank.
    before_step: Sequence[Observer] = ()
    after_step: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        device, place = self.data.device, self.group.place
        self.windows = StepWindows(self.report, place, self.strategy.devices)
        # Of the epoch in progress: this rank's sum of losses, and its wait for data.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.wait_s = 0.0
        self.begun = False  # this process has made an iteration
        self._seen: set[int] = set()  # sizes of the global batch
        self.peak_lr = peak_lr(self.spec)

    def train(self) -> tuple[float, float]:
        """Train for all steps left; return the final validation loss and accuracy (0 to 1)."""
        self.windows.start(self._warmup(self.progress.position), self.spec.why)
        validation = None
        while not self.finished:
            validation = self._epoch(self.progress.epoch)
            # An epoch that --max-steps cut short may be continued from the last checkpoint.
            if self.progress.position == self.batches.samples:
                self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
            if self.guard:
                self.guard.epoch_done(self)
        # None where it was interrupted after its last epoch.
        return validation or means(self.group.reduce(self.evaluate(), "sum"))

    @property
    def finished(self) -> bool:
        """Whether all epochs are trained, or the steps of --max-steps."""
        progress, max_steps = self.progress, self.spec.max_steps
        cut = max_steps is not None and progress.iteration >= max_steps
        return cut or progress.epoch >= self.spec.epochs

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training, at this size of the batch."""
        return total_steps(self.spec, len(self.batches))

    @property
    def epoch_over(self) -> bool:
        """Whether no step of the epoch is left: what comes is its evaluation."""
        return self.finished or self.progress.position == self.batches.samples

    def _epoch(self, epoch: int) -> tuple[float, float]:
        """Train and evaluate for one epoch and report it; return validation loss and accuracy."""
        begun_at, device = self.progress.position, self.data.device
        first = self.progress.iteration
        lr = self.train_epoch(epoch, begun_at)
        timed, begin = self.windows, time.perf_counter()  # the device is idle, here and afterwards
        sums = {"train_loss": self.loss_sum.item(), "images": timed.images, **self.evaluate()}
        largest = {
            "epoch_time_s": timed.epoch_s,
            "eval_time_s": time.perf_counter() - begin,
            "data_wait_s": timed.wait_s,
            **peak_memory_mib(device),
        }
        self.report.log(
            f"epoch {epoch}, this rank: {timed.images} images in {timed.epoch_s:.4f} s, of it "
            f"waiting for data {timed.wait_s:.4f} s; peak memory "
            f"{largest['peak_memory_mib']:.1f} MiB"
        )
        sums, largest = self.group.reduce(sums, "sum"), self.group.reduce(largest, "max")
        train_loss = sums["train_loss"] / self.progress.position
        val_loss, val_accuracy = means(sums)
        images_per_s = sums["images"] / largest["epoch_time_s"]
        self.report.record(
            "epoch",
            epoch=epoch,
            iterations=self.progress.iteration - first,
            train_loss=train_loss,
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            timed_images=int(sums["images"]),
            images_per_s=images_per_s,
            lr=lr,
            begun_at=begun_at,
            **largest,
        )
        self.report.say(
            f"epoch {epoch + 1}/{self.spec.epochs}: loss {train_loss:.4f}, "
            f"validation loss {val_loss:.4f}, accuracy {val_accuracy:.1%}, "
            f"{largest['epoch_time_s']:.2f} s, {images_per_s:,.0f} images/s"
        )
        return val_loss, val_accuracy

    def train_epoch(self, epoch: int, position: int = 0) -> float:
        """Train for one epoch, of which windows and the sum of losses are; return the last rate.

        position: samples of the epoch that an earlier process has trained on. Their losses are in
        the sum already; their time is in no window.
        """
        self.strategy.model.train()
        self.progress.epoch, self.progress.position = epoch, position
        if position == 0:
            self.loss_sum.zero_()
        self.wait_s, images, begin = 0.0, 0, time.perf_counter()
        warmup, lr = self._warmup(position), 0.0
        self.windows.begin_epoch(epoch)
        steps = self.batches.epoch(epoch, position, self.data.device)
        for i, step in enumerate(self.data.cropped_ahead(steps, epoch)):
            for observe in self.before_step if i >= warmup else ():
                observe(self, step)
            lr = self._set_rate()
            self._leave_out(step)
            self.loss_sum += self._train_step(step, epoch)
            self.progress.position += step.global_count
            self.progress.iteration += 1
            if not self.begun:
                self.report.record_startup(synchronised_s() - begin, self.spec.compile)
                self.begun = True
            work = sum(map(len, step.micro_batches)) * self.strategy.owns_loss
            images += work
            self.windows.step(work)
            if self.guard:
                with self.windows.span(OWN):
                    self.guard.edge(self)
            for observe in self.after_step if i >= warmup else ():
                observe(self, step)
            if self.finished:
                break
        self.windows.end_epoch(begin, images, self.wait_s)  # the device is idle now
        return lr

    def _leave_out(self, step: Step) -> None:
        """Leave out an iteration in which a new size of the batch costs time once and for all.

        The model is compiled for it, or cuDNN tries its kernels.
        """
        searches = self.data.device.type == "cuda" and torch.backends.cudnn.benchmark
        new = (self.spec.compile or searches) and step.global_count not in self._seen
        self._seen.add(step.global_count)
        if new and self.begun:  # the first one of all is excluded as the warm-up is
            self.windows.skip()

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

    def _train_step(self, step: Step, epoch: int) -> torch.Tensor:
        """One optimizer step over the global batch; returns the sum of this rank's losses."""
        # The strategies average gradients over the ranks that have different samples: this makes
        # it the mean over the samples.
        weight = self.strategy.data_world_size / step.global_count
        losses = torch.zeros((), dtype=torch.float64, device=self.data.device)
        for j, indices in enumerate(step.micro_batches):
            begin = time.perf_counter()
            with self.windows.span(DATA):  # the device is not synchronised here
                images, labels = self.data.training_batch(indices, epoch, step.crops[j])
            wait_s = time.perf_counter() - begin
            self.wait_s += wait_s
            self.windows.waited(wait_s)
            last = j == len(step.micro_batches) - 1
            losses += self.strategy.forward_backward(images, labels, weight, last)
        self.strategy.optimizer_step(self.optimizer)
        return losses

    def evaluate(self) -> dict[str, float]:
        """This rank's sums over its test samples: val_loss, val_correct, val_samples.

        Every sample once over all ranks; each rank calls the model as often as the others.
        """
        strategy, data = self.strategy, self.data
        strategy.model.eval()
        strategy.share_buffers()
        flips = self.spec.speed_run
        predict = partial(predict_flipped, strategy.predict) if flips else strategy.predict
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
            logits = predict(images)
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
    falls = {"onecycle": left, "speed run": _LAST + (1 - _LAST) * left, "constant": 1.0}
    falls["cosine"] = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return peak * falls[kind]


def total_steps(spec: RunSpec, steps_per_epoch: int) -> int:
    """The steps of the whole training: those of all epochs, or of --max-steps if that is less."""
    steps = spec.epochs * steps_per_epoch
    return steps if spec.max_steps is None else min(steps, spec.max_steps)
