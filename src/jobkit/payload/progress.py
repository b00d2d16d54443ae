"""How far a training has come, and what happens between two of its iterations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jobkit.payload.data import Step
    from jobkit.payload.train import Trainer


@dataclass
class Progress:
    """Where a training stands, whatever the number of its ranks and the size of its batches."""

    epoch: int = 0  # the one in progress, from 0
    position: int = 0  # its training samples that have been used, over all ranks
    iteration: int = 0  # optimizer steps in all

    def step(self, samples: int) -> None:
        """One more iteration is done."""
        self.position += samples
        self.iteration += 1

    def next_epoch(self) -> None:
        """The epoch is trained, evaluated and recorded."""
        self.epoch += 1
        self.position = 0


class Guard(Protocol):
    """What is asked between two iterations; every rank asks at the same ones.

    edge and epoch_done may raise Stopped: the state is saved then, and the training ends.
    """

    def edge(self, trainer: "Trainer") -> None:
        """An iteration is done."""

    def epoch_done(self, trainer: "Trainer") -> None:
        """An epoch is done and recorded."""

    def alive(self, where: str) -> None:
        """The rank goes on, in the middle of something long."""

    def may_record(self) -> None:
        """Raise where the run's records are another attempt's to write by now."""


class Observer(Protocol):
    """Looks at single iterations of the training, and changes nothing in it."""

    def wants(self, trainer: "Trainer") -> bool:
        """Whether it looks at the next iteration; the same on every rank."""

    def before(self, trainer: "Trainer", step: "Step") -> None:
        """The iteration is next."""

    def after(self, trainer: "Trainer", step: "Step") -> None:
        """It is done."""


class Stopped(Exception):
    """The training ends early, because somebody asked for it; the text says who and where."""
