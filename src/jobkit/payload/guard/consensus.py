"""Between two iterations: the ranks agree whether to save or to stop, and do it.

The request of each rank (a signal asks it to stop, by its clock a checkpoint is due) goes into an
all-reduce that is read when the next one begins, one iteration later: no rank waits for it, and all
act at the same iteration. On GPUs, whose iterations may be short, several iterations are between.
"""

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from jobkit.payload.checkpoints.manager import CheckpointManager
from jobkit.payload.guard.faults import PlannedFault
from jobkit.payload.guard.stopping import StopRequest
from jobkit.payload.guard.watchdog import Watchdog
from jobkit.payload.progress import Stopped

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

_NOTHING, _SAVE, _STOP = 0, 1, 2  # the largest request of all ranks counts
# Gloo sends round a ring of all ranks, over TCP: milliseconds at 64 ranks, and a GPU's iteration
# may take one. So the ranks agree at intervals of about this time, where they compute on GPUs.
_INTERVAL_S = 0.05
_MEASURED = (3, 5)  # between these iterations, which are not timed by default
_MOST = 50  # iterations


class Pace:
    """How many iterations apart the ranks agree: 1 until rank 0 has measured and told it."""

    def __init__(self, device: torch.device | None) -> None:
        """device: the rank's; on a CPU, or for None, the ranks agree after every iteration."""
        self._device = device if device is not None and device.type == "cuda" else None
        self._begin = 0.0

    def proposal(self, iteration: int) -> int:
        """After an iteration of this process: how many apart the ranks shall agree from now on.

        0 where it is not the time to change it.
        """
        if self._device is None or iteration not in _MEASURED:
            return 0
        torch.cuda.synchronize(self._device)
        now, first, last = time.monotonic(), *_MEASURED
        if iteration == first:
            self._begin = now
            return 0
        seconds = (now - self._begin) / (last - first)
        return max(1, min(_MOST, int(_INTERVAL_S / max(seconds, 1e-6))))


class Consensus:
    """The ranks' requests, agreed without waiting. group: a Gloo group for this purpose only."""

    def __init__(self, group: dist.ProcessGroup, pace: Pace | None = None) -> None:
        """pace: how often they agree; None: after every iteration."""
        self._group, self._alone = group, dist.get_world_size(group) == 1
        self._first, self._pace = dist.get_rank(group) == 0, pace or Pace(None)
        self._request = torch.zeros(2, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._iteration = 0  # of this process: the same on all ranks
        self.every = 1  # iterations

    def agree(self, own: int) -> int:
        """Give this rank's request; return the largest of all ranks when they last agreed."""
        if self._alone:
            return own
        self._iteration += 1
        proposal = self._pace.proposal(self._iteration)
        if self._iteration % self.every:
            return _NOTHING
        agreed = self.settle()
        # All ranks measure, so that all wait alike; rank 0's proposal counts.
        self._request = torch.tensor([own, proposal * self._first], dtype=torch.int32)
        self._work = dist.all_reduce(
            self._request, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return agreed

    def settle(self) -> int:
        """The last agreement; no all-reduce is pending afterwards."""
        if self._work is None:
            return _NOTHING
        self._work.wait()
        self._work = None
        request, proposed = self._request.tolist()
        self.every = proposed or self.every
        return int(request)


class JobGuard:
    """The guard of a job's training; see train.Guard."""

    def __init__(
        self,
        *,
        consensus: Consensus,
        stop: StopRequest,
        watchdog: Watchdog | None,
        checkpoints: CheckpointManager | None,
        fault: PlannedFault | None,
    ) -> None:
        """checkpoints None: none are written. watchdog None: hangs are not detected."""
        self._consensus, self._stop, self._watchdog = consensus, stop, watchdog
        self._checkpoints, self._fault = checkpoints, fault
        self._pending = _NOTHING

    def start(self) -> None:
        """The first iteration is next."""
        self._stop.listen_to_all()
        if self._watchdog:
            self._watchdog.start()

    def edge(self, trainer: "Trainer") -> None:
        done, checkpoints = trainer.progress.iteration, self._checkpoints
        self.alive(f"iteration {done}")
        if self._fault:
            self._fault.inject(done, self._stop)
        late = checkpoints is not None and checkpoints.late()
        own = _STOP if self._stop.signal else _SAVE if late else _NOTHING
        request = self._consensus.agree(own)
        if checkpoints:
            checkpoints.poll()
            if request == _SAVE and checkpoints.begun >= done - self._consensus.every:
                request = _NOTHING  # what was requested then has been done since
            if checkpoints.due(done):
                request = max(request, _SAVE)
        if trainer.epoch_over:
            self._pending = request  # once the epoch is evaluated and recorded
        else:
            self._act(trainer, request)

    def epoch_done(self, trainer: "Trainer") -> None:
        epoch = trainer.progress.epoch
        self.alive(f"epoch {epoch}")
        last = trainer.finished
        # After the last step there is nothing to stop.
        request, self._pending = _NOTHING if last else self._pending, _NOTHING
        if self._checkpoints and self._checkpoints.due_after_epoch(last):
            request = max(request, _SAVE)
        self._act(trainer, request)

    def _act(self, trainer: "Trainer", request: int) -> None:
        """Save or stop, as the ranks agreed."""
        if request == _STOP:
            self._end_early(trainer)
        elif request == _SAVE and self._checkpoints:
            with trainer.clock.paused():
                self._checkpoints.save(trainer)
            self.alive(f"the checkpoint of iteration {trainer.progress.iteration}")

    def alive(self, where: str) -> None:
        if self._watchdog:
            self._watchdog.beat(where)

    def may_record(self) -> None:
        if self._checkpoints:
            self._checkpoints.fence()

    def _end_early(self, trainer: "Trainer") -> None:
        """Save and raise Stopped, on every rank."""
        self._consensus.settle()
        names = [n for n in trainer.group.gather(self._stop.signal) if n]
        where = f"{names[0] if names else 'a signal'} after iteration {trainer.progress.iteration}"
        if self._checkpoints:
            with trainer.clock.paused():
                kept = self._checkpoints.save(trainer) and self._checkpoints.wait()
            where += ", checkpoint saved" if kept else ", no checkpoint could be saved"
        raise Stopped(where)

    def close(self) -> None:
        """The training is over: wait for a pending checkpoint and stop the watchdog."""
        self._consensus.settle()
        if self._checkpoints:
            self._checkpoints.wait()
        if self._watchdog:
            self._watchdog.stop()
