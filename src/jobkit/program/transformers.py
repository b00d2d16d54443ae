"""transformers: `Trainer(..., callbacks=[JobkitCallback()])` measures without evaluation."""

from typing import Any

from transformers import TrainerCallback

from . import meter


class JobkitCallback(TrainerCallback):
    """Measures optimizer steps; samples per step are computed from the training's arguments.

    The last batch of an epoch may be smaller: work_per_step says how much it is in your unit.
    """

    def __init__(self, unit: str = "samples", work_per_step: float | None = None) -> None:
        self._unit, self._per_step = unit, work_per_step
        # An epoch is recorded before the next one, as its evaluation comes after its end.
        self._values: dict[str, Any] = {}
        self._epoch: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        computed = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        stated = self._per_step is not None
        meter.start(
            self._unit,
            self._per_step if stated else computed if self._unit == "samples" else None,
            source="transformers",
            work_source="stated" if stated else "computed",
        )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_epoch()
        meter.current().hold(False)
        meter.current().wait()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        meter.current().hold(False)
        meter.current().got()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        meter.step()
        meter.current().wait()
        meter.current().hold(control.should_evaluate or control.should_save)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._epoch = max(round(state.epoch), 1) - 1  # the first may be cut by max_steps
        meter.current().hold(True)  # evaluation and checkpoints follow

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):
            self._values["train_loss"] = logs["loss"]

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kw: Any
    ) -> None:
        for name, number in (metrics or {}).items():
            self._values["val_loss" if name == "eval_loss" else name] = number

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_epoch()
        meter.end()

    def _record_epoch(self) -> None:
        if self._epoch is not None:
            meter.epoch(self._epoch, **self._values)
            self._epoch, self._values = None, {}
