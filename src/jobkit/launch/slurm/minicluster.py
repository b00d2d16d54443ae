"""A minicluster as this process uses it: bring one up, point Slurm's commands at it, break it."""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.launch.command import python_path
from jobkit.paths import read_json

_DIR = "JOBKIT_MINICLUSTER_DIR"  # `hpc/minicluster env` sets it


@dataclass
class Minicluster:
    """A minicluster: its daemons may be killed and its links cut."""

    folder: str
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def named(cls) -> "Minicluster | None":
        """The one that this shell points at; None without."""
        folder = os.environ.get(_DIR)
        return cls(folder) if folder and Path(folder).is_dir() else None

    @classmethod
    def up(cls, purpose: str, *options: str, links: bool = False) -> "Minicluster":
        """Bring one up in a folder named for its purpose, and point Slurm's commands at it.

        options: of `hpc/minicluster up`. links: with links that can be cut, where this machine
        lets us make them. Raises UsageError with the reason.
        """
        made = cls(tempfile.mkdtemp(prefix=f"jobkit-{purpose}-", dir="/tmp"))
        links = links and os.geteuid() == 0
        try:
            if not links or made.call("up", *options, "--netns").returncode:
                made.do("up", *options)
        except BaseException:
            made.down()
            raise
        made._point_here()
        return made

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run `hpc/minicluster words`."""
        return subprocess.run(
            [sys.executable, "-m", "minicluster", *words, "--dir", self.folder],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def do(self, *words: str) -> None:
        """Run a command that must succeed; the minicluster refuses a second at the same time."""
        with self._one_at_a_time:
            done = self.call(*words)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise UsageError(" ".join(said) or f"hpc/minicluster {words[0]} failed")

    def holder(self, node: str) -> int | None:
        """Return a process in the mount namespace of a node's jobs; None without root."""
        pids = {p["name"]: int(p["pid"]) for p in self._state().get("processes", ())}
        return pids.get(f"net-{node}") or pids.get("names")

    @property
    def links(self) -> bool:
        """Whether each node has a network link that can be cut."""
        return bool(self._state().get("subnet"))

    @property
    def saved_at(self) -> float:
        """When slurmctld last saved what it knows of jobs, in Unix seconds; 0 where it has not."""
        try:
            return (Path(self.folder) / "state" / "job_state").stat().st_mtime
        except FileNotFoundError:  # slurmctld is just putting a new one in its place
            return 0.0

    @property
    def nodes(self) -> list[str]:
        """Its nodes' names."""
        return [f"n{i}" for i in range(1, 1 + self._state().get("options", {}).get("nodes", 0))]

    def _state(self) -> dict[str, Any]:
        return read_json(Path(self.folder) / "minicluster.json") or {}

    def _point_here(self) -> None:
        """Point Slurm's commands of this process at it."""
        for line in self.call("env").stdout.splitlines():
            name, _, value = shlex.split(line)[1].partition("=")
            os.environ[name] = value

    def down(self) -> None:
        """Take the cluster down and remove all its files."""
        self.call("down")
        with contextlib.suppress(OSError):
            Path(self.folder).rmdir()
