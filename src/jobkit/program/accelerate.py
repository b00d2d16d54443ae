"""Accelerate: a loop over `Measured(accelerator).batches(loader)` is measured, step by step.

    accelerator = Accelerator(log_with=JobkitTracker())  # optional: records what is logged
    measured = Measured(accelerator)
    for x, y in measured.batches(loader):
        with accelerator.accumulate(model): ...
    with measured.paused(): evaluate()  # then measured.epoch(0, val_loss=val_loss)

Accelerate makes its trackers on the main process only, so the measurement is an object of its own.
"""

from collections.abc import Iterator
from typing import Any

from accelerate.tracking import GeneralTracker

from . import meter
from .hook import samples


class Measured:
    """Counts a step where the accelerator has synchronised the gradients after a batch."""

    def __init__(
        self, accelerator: Any, unit: str = "samples", work_per_step: float | None = None
    ) -> None:
        inferred = "inferred" if work_per_step is None else None
        self._accelerator, self._per_step = accelerator, work_per_step
        self.epoch, self.paused, self.end = meter.epoch, meter.paused, meter.end
        meter.start(unit, work_per_step, source="accelerate", work_source=inferred)

    def batches(self, loader: Any) -> Iterator[Any]:
        """The loader's batches."""
        work = 0
        for batch in meter.batches(loader):
            work += samples(batch) or 0
            yield batch
            if self._accelerator.sync_gradients:
                meter.step(work if work and self._per_step is None else None)
                work = 0


class JobkitTracker(GeneralTracker):
    """Records what the program gives to accelerator.log; ends the measurement with the training."""

    name, requires_logging_directory, main_process_only = "jobkit", False, False

    @property
    def tracker(self) -> Any:
        return meter

    def store_init_configuration(self, values: Any) -> None:
        """Nothing: a study has its parameters."""

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        for name, number in values.items():
            meter.value(name, number)

    def finish(self) -> None:
        meter.end()
