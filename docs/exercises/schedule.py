"""The schedule of a pipeline, measured: when each stage computes which microbatch."""

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ranks import on_ranks

SLOT_S = 0.02
_KINDS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Slot(NamedTuple):
    """One microbatch in one stage: begin and end in ms after the first slot."""

    stage: int
    kind: str  # F forward, B backward
    microbatch: int
    begin_ms: float
    end_ms: float


class _Stage(PipelineStage):
    """A stage that notes when it computes, and waits until the slot has its length.

    So stages need no core each, as they would not on GPUs of their own.
    """

    def _noted(self, kind, compute, chunk, *args, **kwargs):
        begin = time.monotonic()
        done = compute(chunk, *args, **kwargs)
        time.sleep(max(0, begin + SLOT_S - time.monotonic()))
        end = time.monotonic()
        self.slots.append(Slot(self.stage_index, kind, chunk, 1000 * begin, 1000 * end))
        return done

    def forward_one_chunk(self, *args, **kwargs):
        return self._noted("F", super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        return self._noted("B", super().backward_one_chunk, *args, **kwargs)


def _run(rank, order, stages, microbatches):
    """Two steps on one stage; the slots of the second, as the first one makes buffers."""
    stage = _Stage(nn.Linear(64, 64), rank, stages, torch.device("cpu"))
    schedule = _KINDS[order](stage, microbatches, loss_fn=F.mse_loss)
    x = torch.randn(64 * microbatches, 64)
    for _ in range(2):
        stage.slots = []
        schedule.step(*[x] * (rank == 0), **{"target": x} if rank == stages - 1 else {})
    return stage.slots


def measure(order, stages=4, microbatches=4):
    """The slots of one training step, each stage on one rank; order: gpipe or 1f1b."""
    ranks = on_ranks(_run, order, stages, microbatches, world=stages)
    slots = [slot for rank in ranks for slot in rank]
    first = min(slot.begin_ms for slot in slots)
    return [s._replace(begin_ms=s.begin_ms - first, end_ms=s.end_ms - first) for s in slots]
