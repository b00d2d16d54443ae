"""Exercise 4.3: the collectives of a training step, its time and what is held."""

import statistics
import time

import torch

from exercise_4_2 import count_from_now, layers_of, replicate, shard, tensor_bytes
from ranks import MIB, count_collectives, main, on_ranks

STEPS, BATCH = 7, 16
WIDTHS = (32, 512)
WAYS = {"DDP": 0, "FSDP, 1 group": 1, "FSDP, 8 groups": 8}


def measure(rank):
    """A row of each way for each width."""
    rows = []
    for width in WIDTHS:
        for name, groups in WAYS.items():
            count_from_now()
            model = layers_of(width)
            wrapped = shard(model, groups) if groups else replicate(model)
            optimizer = torch.optim.AdamW(wrapped.parameters())
            x, times = torch.randn(BATCH, width), []

            def step(wrapped=wrapped, optimizer=optimizer, x=x):
                wrapped(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            step()  # the first one makes the buffers
            for _ in range(STEPS):
                begun = time.perf_counter()
                step()
                times.append(1000 * (time.perf_counter() - begun))
            calls = sum(count_collectives(step).values())
            held = tensor_bytes() / MIB
            best = min(times)
            rows.append((8 * width**2, name, calls, statistics.median(times), best, held))
    return rows


def per_step():
    """DDP and FSDP for a small and a larger model."""
    head = ("parameters", "strategy", "collectives", "median (ms)", "best (ms)")
    title = f"a step of AdamW on two ranks: median and best of {STEPS}"
    return title, (*head, "held after it (MiB)"), on_ranks(measure)[0]


if __name__ == "__main__":
    main(per_step)
