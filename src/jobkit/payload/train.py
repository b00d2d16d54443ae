"""The training loop, readable from top to bottom; every strategy goes through it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from jobkit.payload.clock import Clock
from jobkit.payload.data import Batches, DeviceData, Step, share
from jobkit.payload.distributed import Group
from jobkit.payload.host import peak_memory_mib
from jobkit.payload.report import Reporter
from jobkit.payload.schedule import learning_rate
from jobkit.payload.strategies import Strategy
from jobkit.spec import RunSpec


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

    def train(self, started: Callable[[float | None], None]) -> tuple[float, float]:
        """Train for all epochs; return the final validation loss and accuracy (0 to 1).

        started is called once, when everything is ready: before the first iteration, and with
        None; but with --compile after it, with the seconds that it took, as it compiles the model.
        """
        if not self.spec.compile:
            started(None)
        validation = (float("nan"), float("nan"))
        for epoch in range(self.spec.epochs):
            validation = self._epoch(epoch, started)
        return validation

    def _epoch(self, epoch: int, started: Callable[[float | None], None]) -> tuple[float, float]:
        """Train and evaluate once, and report it; return validation loss and accuracy."""
        clock, loss_sum, lr = self.train_epoch(epoch, started)
        own_s = clock.elapsed_s()
        eval_clock = Clock(self.data.device)
        val_sums = self.evaluate()
        eval_time_s = eval_clock.elapsed_s()

        memory = peak_memory_mib(self.data.device)
        self.report.log(
            f"epoch {epoch}, this rank: {clock.images} images in {own_s:.4f} s, of it waiting for "
            f"data {clock.data_wait_s:.4f} s; peak memory {memory[0]:.1f} MiB"
        )
        sums = self.group.reduce([loss_sum, clock.images, *val_sums], "sum")
        worst = self.group.reduce([own_s, eval_time_s, clock.data_wait_s, *memory], "max")
        self._report(epoch, sums, worst, lr)
        return sums[2] / sums[4], sums[3] / sums[4]

    def _report(self, epoch: int, sums: list[float], worst: list[float], lr: float) -> None:
        """Record the epoch, from the ranks' sums and from the worst of them, and say it."""
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
            reserved_memory_mib=worst[4],
            lr=lr,
        )
        self.report.say(
            f"epoch {epoch + 1}/{self.spec.epochs}: loss {train_loss:.4f}, "
            f"validation loss {val_loss:.4f}, accuracy {val_accuracy:.1%}, "
            f"{worst[0]:.2f} s, {sums[1] / worst[0]:,.0f} images/s"
        )

    def train_epoch(
        self, epoch: int, started: Callable[[float | None], None]
    ) -> tuple[Clock, float, float]:
        """Train for one epoch; return its clock, the sum of this rank's losses, the last rate."""
        self.strategy.model.train()
        # At least one iteration of the first epoch is timed, however few it has.
        warmup = min(self.spec.warmup_iterations, len(self.batches) - 1) if epoch == 0 else 0
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.data.device)
        lr = 0.0
        clock = Clock(self.data.device)
        for i, step in enumerate(self.batches.epoch(epoch)):
            if i == warmup > 0:
                clock.restart()
            lr = learning_rate(self.spec, epoch * len(self.batches) + i, len(self.batches))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            loss_sum += self._train_step(step, epoch, clock)
            if self.spec.compile and epoch == i == 0:
                started(clock.elapsed_s())
        clock.stop()  # the device is idle now: the sum can be read
        return clock, loss_sum.item(), lr

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
            losses += self.strategy.forward_backward(images, labels, weight, last)
            clock.images += len(indices) * self.strategy.counts
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
            if size and self.strategy.counts:
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
                seen += size
        return [*sums.tolist(), float(seen)]
