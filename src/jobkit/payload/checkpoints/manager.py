"""Writes a run's checkpoints, keeps the newest, and reports each."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from jobkit.paths import RunPaths
from jobkit.payload.checkpoints import state
from jobkit.payload.checkpoints import store as checkpoint
from jobkit.payload.checkpoints.copies import Copier, once
from jobkit.payload.checkpoints.store import Saved, Store, Unsaved
from jobkit.payload.progress import Progress
from jobkit.payload.report import Reporter
from jobkit.spec.runspec import Every

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer


class Fenced(RuntimeError):
    """A newer attempt of the run has begun: this stale one must not write any more."""


class CheckpointManager:
    """Decides when a run writes a checkpoint, and writes it. Every rank has one."""

    def __init__(
        self,
        store: Store,
        paths: RunPaths,
        attempt: int,
        report: Reporter,
        every: Every,
        *,
        keep: int,
        background: bool,
        device: torch.device | None = None,
    ) -> None:
        """keep: how many stay. background: write in a thread, while training continues.

        device: the rank's; a thread begins on GPU 0, which may be another rank's.
        """
        self._store, self._paths, self._attempt = store, paths, attempt
        self._report, self._every, self._keep = report, every, keep
        on_gpu = device is not None and device.type == "cuda"
        begin = (torch.cuda.set_device, (device,)) if on_gpu else (None, ())
        self._thread = ThreadPoolExecutor(1, "checkpoint", *begin) if background else None
        self._copier = Copier(device)
        self._writing: Future[Saved] | None = None
        self._last_s = time.monotonic()
        self.newest: int | None = None  # the iteration of the run's last good checkpoint
        self.begun = -1  # the iteration of the last one that was begun

    def late(self) -> bool:
        """Whether this rank's clock says that a checkpoint is due."""
        seconds = self._every.seconds
        return seconds is not None and time.monotonic() - self._last_s >= seconds

    def due(self, iteration: int) -> bool:
        """Whether one is due after an iteration."""
        return bool(self._every.iterations) and iteration % (self._every.iterations or 1) == 0

    def due_after_epoch(self, last: bool) -> bool:
        """Whether one is due after an epoch; the last one's is the trained model."""
        return self._every.epochs or (last and self._every != Every())

    def fence(self) -> None:
        """Raise Fenced where a newer attempt of the run has begun."""
        newest = max(self._paths.attempt_numbers(), default=self._attempt)
        if newest > self._attempt:
            raise Fenced(
                f"attempt {self._attempt} is fenced: attempt {newest} of this run has begun"
            )

    def save(self, trainer: "Trainer") -> bool:
        """Write a checkpoint, or start to; return whether it succeeded so far. Every rank calls."""
        self.wait()
        self._last_s, self.begun = time.monotonic(), trainer.progress.iteration
        progress = Progress(**vars(trainer.progress))
        folder = self._paths.checkpoints / checkpoint.name_of(progress.iteration, self._attempt)
        tensors = state.all_tensors(trainer)
        work = (progress, trainer.strategy.layout(), trainer.spec.to_dict(), self.fence)
        if self._thread:
            copies = self._copier.copies(once(tensors, self._store.everyone, self._store.rank))
            self._writing = self._thread.submit(self._store.write, folder, copies, *work)
            return True
        self._writing = Future()
        try:
            self._writing.set_result(self._store.write(folder, tensors, *work))
        except Unsaved as error:
            self._writing.set_exception(error)
        return self.wait()

    def poll(self) -> None:
        """Report a checkpoint that has been written in the background."""
        if self._writing and self._writing.done():
            self.wait()

    def wait(self) -> bool:
        """Wait for a checkpoint that is being written and report it; return whether it succeeded.

        A failure does not end the training.
        """
        if self._writing is None:
            return True
        writing, self._writing = self._writing, None
        try:
            self._report_saved(writing.result())
        except Unsaved as error:
            self.fence()
            last = "there is none" if self.newest is None else f"the last is of {self.newest}"
            self._report.warn(
                f"the checkpoint of iteration {self.begun} could not be written ({error}); {last}"
            )
            return False
        if self._store.rank == 0:
            checkpoint.prune(self._paths, self._attempt, self._keep)
        return True

    def _report_saved(self, saved: Saved) -> None:
        self.newest = saved.iteration
        self._report.record(
            "checkpoint",
            action="saved",
            iteration=saved.iteration,
            bytes=saved.bytes,
            time_s=saved.time_s,
        )
        self._report.log(
            f"checkpoint of iteration {saved.iteration}: {saved.bytes:,} bytes, "
            f"{saved.time_s:.3f} s, {saved.folder}"
        )
