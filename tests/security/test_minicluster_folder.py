"""A cluster's folder that a stranger made at a known name: nothing in it is believed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minicluster import cli, cluster, ownership, state
from minicluster.config import Options
from minicluster.errors import UsageError
from minicluster.layout import Layout
from minicluster.processes import identify
from minicluster.state import State

READING = (["status"], ["env"])
DOORS = [*READING, ["kill", "n1"], ["start", "n1"], ["down"], ["up"], ["link", "heal"]]
STRANGER = 65534


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a path that is short enough for the sockets of a cluster."""
    made = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of ours that the stranger would like to be killed."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def root(
    tmp_path: Path, victim: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder that looks like a cluster that is up, whose node n1 is the victim; still our own."""
    monkeypatch.setattr("minicluster.slurm.subprocess.run", _never)
    monkeypatch.setattr("minicluster.machine.survey", lambda options: None)
    layout = Layout(tmp_path / "mc")
    layout.root.mkdir(mode=0o755)
    process = identify("slurmd.n1", victim.pid)
    assert process
    state.save(layout, State(options=Options(), phase="up", processes=[process]))
    layout.slurm_conf.write_text("PluginDir=/tmp/evil\n")
    return layout.root


def _never(*words: Any, **_: Any) -> None:
    raise AssertionError(f"started: {words}")


def refused(words: list[str], root: Path, victim: "subprocess.Popen[bytes]") -> bool:
    """Whether a command ends with 2, and the victim lives on."""
    code = cli.main([*words, "--dir", str(root)])
    return code == 2 and victim.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(
    ("words", "what"),
    [(w, ".") for w in DOORS]
    # In a folder of one's own no stranger makes a file, and these two read none of its content.
    + [
        (w, f)
        for w in DOORS
        if w[0] not in ("up", "down")
        for f in ("minicluster.json", "slurm.conf")
    ],
)
def test_what_a_stranger_owns_is_refused(
    root: Path, victim: "subprocess.Popen[bytes]", words: list[str], what: str, capsys: Any
) -> None:
    os.chown(root / what, STRANGER, STRANGER)
    assert refused(words, root, victim)
    said = capsys.readouterr()
    assert "belongs to user id 65534" in said.err and "PluginDir" not in said.out


@pytest.mark.parametrize("words", DOORS)
@pytest.mark.parametrize("mode", [0o757, 0o775, 0o1777])
def test_what_others_may_write_to_is_refused(
    root: Path, victim: "subprocess.Popen[bytes]", words: list[str], mode: int
) -> None:
    root.chmod(mode)
    assert refused(words, root, victim)


@pytest.mark.parametrize("words", DOORS)
def test_a_folder_that_others_can_exchange_is_refused(
    root: Path, victim: "subprocess.Popen[bytes]", words: list[str]
) -> None:
    root.parent.chmod(0o777)
    assert refused(words, root, victim)


@pytest.mark.parametrize("words", [w for w in DOORS if w[0] not in ("up", "down")])
@pytest.mark.parametrize("name", ["minicluster.json", "slurm.conf"])
def test_a_link_to_a_file_of_elsewhere_is_refused(
    root: Path, victim: "subprocess.Popen[bytes]", words: list[str], name: str
) -> None:
    (root / name).rename(root.parent / name)
    (root / name).symlink_to(root.parent / name)
    assert refused(words, root, victim)


def test_a_folder_made_by_another_meanwhile_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the folder and mkdir: it was not there, and then it was a stranger's."""
    layout = Layout(tmp_path / "mc")
    layout.root.mkdir(mode=0o777)
    layout.root.chmod(0o777)
    plan: Any = type("Plan", (), {"layout": layout})
    with pytest.raises(UsageError, match="others may write"):
        cluster.write_files(plan, State(options=Options()))
    assert list(layout.root.iterdir()) == []


def test_ones_own_folder_in_tmp_is_fine(root: Path) -> None:
    ownership.check(root)
    assert cluster.running(Layout(root)).phase == "up"


@pytest.mark.parametrize("text", ["null", "[]", "1", "[" * 100_000, '{"format": 1}', ""])
def test_a_state_file_that_is_none_means_no_cluster(root: Path, text: str, capsys: Any) -> None:
    (root / "minicluster.json").write_text(text)
    assert cli.main(["status", "--dir", str(root)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
