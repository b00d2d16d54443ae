"""The schedule of a pipeline, measured: when each stage computes which microbatch."""

import time
from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ranks import on_ranks

_WIDTH, _BATCH = 256, 256
_KINDS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Slot(NamedTuple):
    """One microbatch in one stage: begin and end in ms after the first slot."""

    stage: int
    kind: str  # F forward, B backward
    microbatch: int
    begin_ms: float
    end_ms: float


class _Stage(PipelineStage):
    """A stage that notes when it computes."""

    def _noted(self, kind, compute, chunk, *args, **kwargs):
        begun = 1000 * time.monotonic()
        done = compute(chunk, *args, **kwargs)
        self.slots.append(Slot(self.stage_index, kind, chunk, begun, 1000 * time.monotonic()))
        return done

    def forward_one_chunk(self, *args, **kwargs):
        return self._noted("F", super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        return self._noted("B", super().backward_one_chunk, *args, **kwargs)


def _run(rank, order, stages, microbatches):
    """Two steps on one stage; the slots of the second, as the first one makes buffers."""
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
    stage = _Stage(layers, rank, stages, torch.device("cpu"))
    schedule = _KINDS[order](stage, microbatches, loss_fn=F.mse_loss)
    x = torch.randn(_BATCH * microbatches, _WIDTH)
    for _ in range(2):
        stage.slots = []
        schedule.step(*[x] * (rank == 0), **{"target": x} if rank == stages - 1 else {})
    return stage.slots


def measure(order, stages=4, microbatches=4):
    """The slots of one training step, each stage on one rank; order: gpipe or 1f1b."""
    ranks = on_ranks(_run, order, stages, microbatches, world=stages)
    slots = sorted((slot for rank in ranks for slot in rank), key=lambda slot: slot.begin_ms)
    first = slots[0].begin_ms
    return [s._replace(begin_ms=s.begin_ms - first, end_ms=s.end_ms - first) for s in slots]


def slots_of_equal_length(measured):
    """The same order if every slot took one unit of time and messages none.

    A forward slot comes after that of the stage before, a backward slot after that of the stage
    behind; on one stage the slots keep the measured order.
    """
    ends, free, made = {}, Counter(), []
    for slot in measured:  # in the order in which they began, and so after what they wait for
        other = slot.stage + (-1 if slot.kind == "F" else 1)
        begin = max(free[slot.stage], ends.get((other, slot.kind, slot.microbatch), 0))
        ends[slot.stage, slot.kind, slot.microbatch] = free[slot.stage] = begin + 1
        made.append(slot._replace(begin_ms=begin, end_ms=begin + 1))
    return made
