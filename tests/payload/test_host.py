"""Threads of a rank, from what the scheduler gave it."""

import os

import pytest

from jobkit.payload.place import share_of_cores


@pytest.mark.parametrize(
    ("cores", "ranks", "environ", "threads"),
    [
        (8, 1, {}, 8),
        (8, 4, {}, 2),
        (2, 4, {}, 1),
        (64, 4, {"SLURM_CPUS_PER_TASK": "16"}, 16),
        (8, 4, {"SLURM_CPUS_PER_TASK": "16"}, 8),  # bound to fewer than were asked for
        (64, 4, {"SLURM_CPUS_ON_NODE": "32"}, 8),  # not bound, and half of the node is ours
        (8, 4, {"SLURM_CPUS_ON_NODE": "32"}, 8),  # each task is bound to its own eight
        (2, 4, {"SLURM_CPUS_ON_NODE": "4"}, 1),  # simulated nodes on a small machine
    ],
)
def test_share_of_cores(monkeypatch, cores: int, ranks: int, environ, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert share_of_cores(ranks, environ) == threads
