"""A minicluster that a command brings up for itself: what it is pointed at, and what is left."""

import os
import subprocess
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.launch.slurm import minicluster
from jobkit.launch.slurm.minicluster import Minicluster


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The calls of `hpc/minicluster`, which makes no network and says where it is."""
    made: list[list[str]] = []

    def call(self: Minicluster, *words: str) -> "subprocess.CompletedProcess[str]":
        made.append([*words])
        bad = "--netns" in words or "--nodes=0" in words
        shown = f"export JOBKIT_MINICLUSTER_DIR={self.folder}\n" if words == ("env",) else ""
        return subprocess.CompletedProcess([], 2 * bad, shown, "one\ntwo\n" * bad)

    monkeypatch.setattr(Minicluster, "call", call)
    monkeypatch.setenv("JOBKIT_MINICLUSTER_DIR", "/nonexistent")
    return made


def test_links_are_left_out_where_they_cannot_be_made(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minicluster.os, "geteuid", lambda: 0)
    assert Minicluster.named() is None
    made = Minicluster.up("test", "--nodes=2", links=True)
    assert calls == [["up", "--nodes=2", "--netns"], ["up", "--nodes=2"], ["env"]]
    assert os.environ["JOBKIT_MINICLUSTER_DIR"] == made.folder
    named = Minicluster.named()
    assert named and named.folder == made.folder
    made.down()
    assert not Path(made.folder).exists()


def test_one_that_does_not_come_up_leaves_nothing(calls: list[list[str]]) -> None:
    before = set(Path("/tmp").glob("jobkit-none-*"))
    with pytest.raises(UsageError, match="one two"):
        Minicluster.up("none", "--nodes=0")
    assert calls == [["up", "--nodes=0"], ["down"]]
    assert set(Path("/tmp").glob("jobkit-none-*")) == before
