"""Between two iterations: the ranks agree whether to save a checkpoint or to stop, and do it.

Each rank's request (a signal asks it to stop, by its clock a checkpoint is due) goes into an
all-reduce that is read when the next one begins: no rank waits for it, and all act at the same
iteration. At the end of an epoch it is waited for.

A rank that makes no progress for most of a collective's timeout writes the stacks of its threads
into its log, so that a hang shows where each rank stands. What ends the ranks is the timeout; one
rank alone, which no collective ends, ends itself.
"""

import faulthandler
import time
from typing import TYPE_CHECKING, TextIO

import torch
import torch.distributed as dist

from jobkit.payload.checkpoint import Checkpoints
from jobkit.payload.signals import ENDING, PlannedFault, Stopped, StopRequest
from jobkit.spec.runspec import Every, RunSpec

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_NOTHING, _SAVE, _STOP = 0, 1, 2  # the largest request of all ranks counts
# Iterations between two agreements. Gloo sends round a ring of all ranks over TCP, which takes
# milliseconds at 64 ranks; an iteration on a GPU may take one.
_SPACING = {"cpu": 1, "cuda": 10}
_MIN_AGREEMENTS = 16  # in what is left of the training: a stop comes within an eighth of it
_HUNG = 0.8  # of the timeout: stacks are written
_ALONE = 1.25  # of the timeout: one rank alone writes them, and ends itself


class JobGuard:
    """The guard of a job's training; see train.Trainer."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        group: dist.ProcessGroup,
        stop: StopRequest,
        checkpoints: Checkpoints | None = None,
        fault: PlannedFault | None = None,
        device: str = "cpu",
        log: TextIO | None = None,
    ) -> None:
        """group: a Gloo group for this purpose only.

        log: for the stacks of a rank that hangs; without one nobody looks.
        """
        self._group, self._alone = group, dist.get_world_size(group) == 1
        self._stop, self._checkpoints = stop, checkpoints
        self._every = Every.of(spec.checkpoint_every)
        self._fault, self._spacing = fault, _SPACING[device]
        self._timeout_s, self._log, self._rearm_s = spec.timeout_s, log, 0.0
        self._request = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._asked = 0  # the iteration of the last request
        self._pending = _NOTHING  # for the end of the epoch

    def start(self) -> None:
        """The first iteration is next."""
        self._stop.listen(*ENDING)
        self.alive()

    def alive(self) -> None:
        """The rank makes progress: its stacks are due later."""
        share = _ALONE if self._alone else _HUNG
        now, seconds = time.monotonic(), share * self._timeout_s
        if self._log is not None and now >= self._rearm_s:  # not each time: it starts a thread
            faulthandler.dump_traceback_later(seconds, exit=self._alone, file=self._log)
            self._rearm_s = now + seconds / 20

    def edge(self, trainer: "Trainer") -> None:
        """An iteration is done. Raises Stopped, on every rank, once the state is saved."""
        done, checkpoints = trainer.progress.iteration, self._checkpoints
        self.alive()
        if self._fault:
            self._fault.inject(done, self._stop)
        late = False
        if checkpoints and self._every.seconds is not None:
            late = time.monotonic() - checkpoints.begun_s >= self._every.seconds
        request = _STOP if self._stop.signal else _SAVE if late else _NOTHING
        if not self._alone:
            request = self._agree(request, trainer)
        if self._every.iterations and done % self._every.iterations == 0:
            request = max(request, _SAVE)
        if trainer.epoch_over:
            self._pending = request  # once the epoch is evaluated and recorded
        else:
            self._act(trainer, request)

    def epoch_done(self, trainer: "Trainer") -> None:
        """An epoch is done and recorded. Raises Stopped as edge does."""
        self.alive()
        last = trainer.finished
        # After the last step there is nothing to stop, and the trained model is saved.
        request, self._pending = _NOTHING if last else self._pending, _NOTHING
        if self._every.epochs or (last and self._every != Every()):
            request = max(request, _SAVE)
        self._act(trainer, request)

    def _agree(self, request: int, trainer: "Trainer") -> int:
        """Give this rank's request; return the largest of all ranks when they last agreed."""
        done, at_once = trainer.progress.iteration, trainer.epoch_over
        spacing = max(1, min(self._spacing, (trainer.total_steps - done) // _MIN_AGREEMENTS))
        if not at_once and done - self._asked < spacing:
            return _NOTHING
        agreed = self._settled()
        self._request, self._asked = torch.tensor([request], dtype=torch.int32), done
        self._work = dist.all_reduce(
            self._request, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return max(agreed, self._settled()) if at_once else agreed

    def _settled(self) -> int:
        """The last agreement; no all-reduce is pending afterwards."""
        if self._work is None:
            return _NOTHING
        self._work.wait()
        self._work, request = None, int(self._request)
        if request == _SAVE and self._checkpoints and self._checkpoints.begun >= self._asked:
            return _NOTHING  # what was requested then has been done since
        return request

    def _act(self, trainer: "Trainer", request: int) -> None:
        """Save or stop, as the ranks agreed."""
        where, checkpoints = f"after iteration {trainer.progress.iteration}", self._checkpoints
        if request != _NOTHING and checkpoints:
            faulthandler.cancel_dump_traceback_later()  # a large state may take long
            trainer.windows.pause()
            saved = checkpoints.save(trainer)
            trainer.windows.resume()
            where += ", checkpoint saved" if saved else ", no checkpoint could be saved"
            self._rearm_s = 0.0
            self.alive()
        if request == _STOP:
            self.close()
            names = [name for name in trainer.group.gather(self._stop.signal) if name]
            raise Stopped(f"{(names or ['a signal'])[0]} {where}")

    def close(self) -> None:
        """The training is over."""
        self._settled()
        faulthandler.cancel_dump_traceback_later()
