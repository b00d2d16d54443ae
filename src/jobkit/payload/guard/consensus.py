"""Between two iterations: the ranks agree whether to save or to stop, and do it.

What each rank wishes (somebody asked it to stop, its clock says that a checkpoint is due) goes
into an all-reduce that is read one iteration later: no rank waits for it, and all act at the same
iteration.
"""

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

_NOTHING, _SAVE, _STOP = 0, 1, 2  # the greatest wish of all ranks counts


class Consensus:
    """What the ranks wish, agreed without waiting. group: of the CPU, used for nothing else."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._alone = group, dist.get_world_size(group) == 1
        self._word = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def agree(self, own: int) -> int:
        """Give this rank's wish; return the ranks' greatest of the iteration before."""
        if self._alone:
            return own
        agreed = self.settle()
        self._word = torch.tensor([own], dtype=torch.int32)
        self._work = dist.all_reduce(
            self._word, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return agreed

    def settle(self) -> int:
        """What was agreed last; nothing is under way afterwards."""
        if self._work is None:
            return _NOTHING
        self._work.wait()
        self._work = None
        return int(self._word)


class JobGuard:
    """The guard of a job's training; see progress.Guard."""

    def __init__(
        self,
        *,
        wishes: Consensus,
        stop: StopRequest,
        watchdog: Watchdog | None,
        keeper: CheckpointManager | None,
        fault: PlannedFault | None,
    ) -> None:
        """keeper None: nothing is written. watchdog None: nothing is watched."""
        self._wishes, self._stop, self._watchdog = wishes, stop, watchdog
        self._keeper, self._fault = keeper, fault
        self._owed = _NOTHING

    def start(self) -> None:
        """The first iteration is next."""
        self._stop.listen_to_all()
        if self._watchdog:
            self._watchdog.start()

    def edge(self, trainer: "Trainer") -> None:
        done, keeper = trainer.progress.iteration, self._keeper
        self.alive(f"iteration {done}")
        if self._fault:
            self._fault.strike(done, self._stop)
        own = _STOP if self._stop.signal else _SAVE if keeper and keeper.late() else _NOTHING
        wish = self._wishes.agree(own)
        if keeper:
            keeper.poll()
            if wish == _SAVE and keeper.begun >= done - 1:
                wish = _NOTHING  # what was wished then has been done since
            if keeper.due(done):
                wish = max(wish, _SAVE)
        if trainer.progress.position == trainer.batches.samples:
            self._owed = wish  # once the epoch is evaluated and recorded
        else:
            self._act(trainer, wish)

    def epoch_done(self, trainer: "Trainer") -> None:
        epoch = trainer.progress.epoch
        self.alive(f"epoch {epoch}")
        last = epoch == trainer.spec.epochs
        # After the last epoch there is nothing to stop.
        wish, self._owed = _NOTHING if last else self._owed, _NOTHING
        if self._keeper and self._keeper.due_after_epoch(last):
            wish = max(wish, _SAVE)
        self._act(trainer, wish)

    def _act(self, trainer: "Trainer", wish: int) -> None:
        """Do what the ranks agreed on."""
        if wish == _STOP:
            self._end_early(trainer)
        elif wish == _SAVE and self._keeper:
            with trainer.clock.paused():
                self._keeper.save(trainer)
            self.alive(f"the checkpoint of iteration {trainer.progress.iteration}")

    def alive(self, where: str) -> None:
        if self._watchdog:
            self._watchdog.beat(where)

    def may_record(self) -> None:
        if self._keeper:
            self._keeper.fence()

    def _end_early(self, trainer: "Trainer") -> None:
        """Save and raise Stopped, on every rank."""
        self._wishes.settle()
        names = [n for n in trainer.group.gather(self._stop.signal) if n]
        where = f"{names[0] if names else 'a signal'} after iteration {trainer.progress.iteration}"
        if self._keeper:
            with trainer.clock.paused():
                kept = self._keeper.save(trainer) and self._keeper.wait()
            where += ", checkpoint saved" if kept else ", no checkpoint could be saved"
        raise Stopped(where)

    def close(self) -> None:
        """The training is over: wait for what is being written, watch no more."""
        self._wishes.settle()
        if self._keeper:
            self._keeper.wait()
        if self._watchdog:
            self._watchdog.stop()
