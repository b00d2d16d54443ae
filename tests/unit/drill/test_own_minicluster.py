"""A minicluster that a command brings up for itself: what it is pointed at, and what is left."""

import os
import subprocess
from pathlib import Path

import pytest

from jobkit.drill import places as minicluster
from jobkit.drill.places import Minicluster
from jobkit.errors import UsageError


def test_one_is_brought_up_named_and_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without links where they cannot be made; one that does not come up leaves nothing."""
    calls: list[list[str]] = []

    def call(self: Minicluster, *words: str) -> "subprocess.CompletedProcess[str]":
        calls.append([*words])
        bad = "--netns" in words or "--nodes=0" in words
        shown = f"export JOBKIT_MINICLUSTER_DIR={self.folder}\n" if words == ("env",) else ""
        return subprocess.CompletedProcess([], 2 * bad, shown, "one\ntwo\n" * bad)

    monkeypatch.setattr(Minicluster, "call", call)
    monkeypatch.setenv("JOBKIT_MINICLUSTER_DIR", "/nonexistent")
    monkeypatch.setattr(minicluster.os, "geteuid", lambda: 0)
    assert Minicluster.named() is None
    made = Minicluster.up("test", "--nodes=2", links=True)
    assert calls == [["up", "--nodes=2", "--netns"], ["up", "--nodes=2"], ["env"]]
    named = Minicluster.named()
    assert named and named.folder == made.folder == os.environ["JOBKIT_MINICLUSTER_DIR"]
    made.down()
    assert not Path(made.folder).exists()
    before = set(Path("/tmp").glob("jobkit-none-*"))
    with pytest.raises(UsageError, match="one two"):
        Minicluster.up("none", "--nodes=0")
    assert calls[-2:] == [["up", "--nodes=0"], ["down"]]
    assert set(Path("/tmp").glob("jobkit-none-*")) == before
