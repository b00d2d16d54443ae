"""Lightning: `Trainer(callbacks=[JobkitCallback()])` measures the training, without validation."""

from typing import Any

from lightning.pytorch import Callback

from . import meter
from .hook import samples


class JobkitCallback(Callback):
    """Measures optimizer steps; samples are counted in the batches unless work_per_step is given.

    data_wait_s has other callbacks between two batches in it, so that it is an upper bound.
    """

    def __init__(self, unit: str = "samples", work_per_step: float | None = None) -> None:
        self._unit, self._per_step = unit, work_per_step
        self._steps, self._work, self._known = 0, 0, True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        inferred = "inferred" if self._per_step is None else None
        meter.start(self._unit, self._per_step, source="lightning", work_source=inferred)
        self._steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        meter.current().hold(False)
        meter.current().wait()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        meter.current().hold(False)
        meter.current().got()
        size = samples(batch)
        self._known, self._work = self._known and size is not None, self._work + (size or 0)

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        if trainer.global_step > self._steps:  # not after each of the batches that accumulate
            self._steps = trainer.global_step
            meter.step(self._work if self._known and self._per_step is None else None)
            self._work, self._known = 0, True
        meter.current().wait()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        meter.current().hold(not trainer.sanity_checking)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        meter.current().epoch(trainer.current_epoch, trainer.callback_metrics)
        meter.current().hold(True)  # the callbacks after this one save checkpoints

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        meter.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        meter.end("failed", repr(exception))
