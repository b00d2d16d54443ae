"""Exercise 4.3: the collectives of a training step, its time and what is held."""

import statistics
import time

import torch

from exercise_4_2 import count_collectives, local_mib, make
from ranks import main, on_ranks

STEPS, BATCH = 7, 16
WAYS = {"DDP": 0, "FSDP, 1 group": 1, "FSDP, 8 groups": 8}


def measure(rank, width, groups):
    """Collectives, median and best time of a step, and MiB of weights and AdamW's moments."""
    model = make(groups, width=width)
    optimizer = torch.optim.AdamW(model.parameters())
    x, times = torch.randn(BATCH, width), []

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes the buffers
    for _ in range(STEPS):
        begun = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - begun))
    calls = sum(count_collectives(step)[1].values())
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    held = local_mib([*model.parameters(), *moments])
    return calls, statistics.median(times), min(times), held


def per_step():
    rows = [
        (8 * width**2, name, *on_ranks(measure, width, groups)[0])
        for width in (32, 512)
        for name, groups in WAYS.items()
    ]
    head = ("parameters", "strategy", "collectives", "median (ms)", "best (ms)", "held (MiB)")
    return f"AdamW on two ranks, {STEPS} steps; held: weights and moments", head, rows


if __name__ == "__main__":
    main(per_step)
