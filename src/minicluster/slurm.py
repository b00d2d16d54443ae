"""Slurm's own commands, pointed at one cluster."""

from __future__ import annotations

import os
import subprocess

from minicluster.layout import DIR_VARIABLE, Layout
from minicluster.machine import command, search_path
from minicluster.processes import MARK


def environment(layout: Layout) -> dict[str, str]:
    """Ours, without another cluster's settings."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "SBATCH", "SALLOC", "SRUN", "SINFO", "SQUEUE", "SACCT"))
    }
    return kept | exports(layout) | {"PATH": search_path()}


def exports(layout: Layout) -> dict[str, str]:
    """What `env` prints: it points Slurm's commands, and ours, at this cluster."""
    return {"SLURM_CONF": str(layout.slurm_conf), DIR_VARIABLE: str(layout.root)}


def ask(layout: Layout, *argv: str, timeout_s: float = 10.0) -> str | None:
    """The command's output; None when it failed or gave no answer in time.

    It carries the daemons' mark: an `up` that is killed leaves none behind that asks on.
    """
    try:
        done = subprocess.run(
            [command(argv[0]), *argv[1:]],
            env=environment(layout) | {MARK: str(layout.root)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def node_states(layout: Layout) -> dict[str, str]:
    """Each node's state as sinfo says it (idle, mixed, down*, ...); empty without an answer."""
    shown = ask(layout, "sinfo", "--noheader", "--Node", "--format=%N %T") or ""
    return dict(line.split() for line in shown.splitlines())
