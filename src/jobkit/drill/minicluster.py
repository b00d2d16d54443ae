"""A minicluster as this process uses it: bring one up, and point Slurm's commands at it."""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.launch.command import python_path

_DIR = "JOBKIT_MINICLUSTER_DIR"  # `hpc/minicluster env` sets it


@dataclass
class Minicluster:
    """A minicluster, known by its folder."""

    folder: str

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
        """Run a command that must succeed. Raises UsageError with what it said."""
        done = self.call(*words)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise UsageError(" ".join(said) or f"hpc/minicluster {words[0]} failed")

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
