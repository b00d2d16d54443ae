"""The cgroup v1 folders that slurmd makes with --memory-limits, and leaves behind.

Their names, slurm_<node>, are fixed in Slurm: one such cluster at a time on a machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from minicluster.processes import wait_until

ROOT = Path("/sys/fs/cgroup")


def _folders(nodes: list[str]) -> list[Path]:
    """Every slurm_<node> folder, below each controller."""
    return [folder for node in nodes for folder in sorted(ROOT.glob(f"*/slurm_{node}"))]


def _bottom_up(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _bottom_up(entry)
    yield folder


def busy(nodes: list[str]) -> list[Path]:
    """Folders of these nodes in which a process runs: another cluster's."""
    return [
        folder
        for folder in _folders(nodes)
        if any((part / "cgroup.procs").read_text().strip() for part in _bottom_up(folder))
    ]


def remove(nodes: list[str]) -> list[Path]:
    """Remove them; the kernel needs a moment after the last process has ended.

    Returns those that could not be removed.
    """
    wait_until(lambda: not _try_remove(nodes), 2.0)
    return _folders(nodes)


def _try_remove(nodes: list[str]) -> list[Path]:
    for folder in _folders(nodes):
        for part in _bottom_up(folder):
            try:
                part.rmdir()
            except OSError:  # still busy
                break
    return _folders(nodes)
