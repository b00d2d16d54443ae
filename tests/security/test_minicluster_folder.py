"""A cluster's folder that a stranger made, or may change: nothing in it is believed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minicluster import cli, cluster, machine
from minicluster.config import Cluster
from minicluster.processes import MARK
from support.refusals import refusal

STRANGER = 65534


def _never(*words: Any, **_: Any) -> None:
    raise AssertionError(f"started: {words}")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of our own that looks like a cluster that is up."""
    above = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))  # short enough for Slurm's sockets
    made = above / "mc"
    made.mkdir(mode=0o755)
    Cluster(root=made).save()
    monkeypatch.setenv(machine.DIR_VARIABLE, str(made))
    monkeypatch.setattr(machine, "check", lambda: None)
    monkeypatch.setattr(machine.subprocess, "run", _never)
    yield made
    shutil.rmtree(above)


SQUATS = {
    "everybody writes": lambda root: root.chmod(0o757),
    "it can be exchanged": lambda root: root.parent.chmod(0o777),
    "a stranger's": lambda root: os.chown(root, STRANGER, STRANGER),
}


@pytest.mark.parametrize("command", ["down", "env", "up"])
@pytest.mark.parametrize("squat", SQUATS)
def test_a_folder_that_others_may_change_is_refused(root, command, squat, capsys) -> None:
    if squat == "a stranger's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    cluster.check_folder(root, reading=True)  # one's own folder in /tmp is fine
    assert cluster.Cluster.load(root).nodes == 4
    SQUATS[squat](root)
    with subprocess.Popen(["cat"], env={MARK: f"{root}:slurmd.n1"}, stdin=-1) as victim:
        assert refusal(cli.main, [command], capsys)
        assert victim.poll() is None
        victim.kill()
    assert (root / "minicluster.json").exists()


def test_what_is_no_cluster_is_one_line(root: Path, capsys) -> None:
    """A file that is not to be read; and a folder with other files, which is left alone."""
    (root / "minicluster.json").write_text('{"format": 1}')
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    (root / "minicluster.json").rename(root / "thesis")
    for command in ("up", "down", "env"):
        assert "holds other files" in refusal(cli.main, [command], capsys)
    assert (root / "thesis").exists()
