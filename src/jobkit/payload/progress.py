"""The progress of a training, and the exception that stops it early."""

from dataclasses import dataclass


@dataclass
class Progress:
    """The position of a training, for any number of ranks and any batch size."""

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


class Stopped(Exception):
    """The training stops early on request; the text says on which signal and where."""
