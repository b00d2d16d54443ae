"""A cluster's folder, or a lock, that a stranger made at a known name: neither is believed."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minicluster import cli, cluster, locks, ownership, state
from minicluster.config import Options
from minicluster.errors import ClusterError, UsageError
from minicluster.layout import Layout
from minicluster.processes import identify
from minicluster.state import State

COMMANDS = (["status"], ["env"], ["kill", "n1"], ["start", "n1"], ["down"], ["up"])
STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of ours that the stranger would like to be killed."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def _never(*words: Any, **_: Any) -> None:
    raise AssertionError(f"started: {words}")


@pytest.fixture
def root(victim: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like a cluster that is up, whose node n1 is the victim; still our own."""
    monkeypatch.setattr("minicluster.slurm.subprocess.run", _never)
    monkeypatch.setattr("minicluster.machine.survey", lambda options: None)
    above = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))  # short enough for Slurm's sockets
    layout = Layout(above / "mc")
    layout.root.mkdir(mode=0o755)
    process = identify("slurmd.n1", victim.pid)
    assert process
    state.save(layout, State(options=Options(), phase="up", processes=[process]))
    layout.slurm_conf.write_text("PluginDir=/tmp/evil\n")
    yield layout.root
    shutil.rmtree(above)


def give(name: str) -> Callable[[Path], None]:
    return lambda root: os.chown(root / name, STRANGER, STRANGER)


def link(name: str) -> Callable[[Path], None]:
    def put(root: Path) -> None:
        (root / name).rename(root.parent / name)
        (root / name).symlink_to(root.parent / name)

    return put


SQUATTED: dict[str, Callable[[Path], None]] = {
    "everybody writes": lambda root: root.chmod(0o757),
    "a group writes": lambda root: root.chmod(0o775),
    "sticky": lambda root: root.chmod(0o1777),
    "its folder can be exchanged": lambda root: root.parent.chmod(0o777),
    "a stranger's": give("."),
}
# In a folder of one's own no stranger makes a file; "up" and "down" read none of its content.
FILES = {"the state is a stranger's": give("minicluster.json"), "a link": link("minicluster.json")}
FILES |= {"the settings are a stranger's": give("slurm.conf"), "another link": link("slurm.conf")}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_folder_that_others_may_change_is_refused(
    root: Path, victim: "subprocess.Popen[bytes]", words: list[str], capsys: Any
) -> None:
    kinds = SQUATTED | ({} if words[0] in ("up", "down") else FILES)
    kept = root.parent.with_name(root.parent.name + "-kept")
    shutil.copytree(root.parent, kept, symlinks=True)
    for what, squat in kinds.items():
        if "stranger" in what and os.geteuid() != 0:
            continue
        squat(root)
        assert cli.main([*words, "--dir", str(root)]) == 2, what
        said = capsys.readouterr()
        assert victim.poll() is None and "PluginDir" not in said.out and said.err.count("\n") == 1
        shutil.rmtree(root.parent)
        shutil.copytree(kept, root.parent, symlinks=True)
        root.parent.chmod(0o700)
    shutil.rmtree(kept)


def test_a_folder_made_by_another_meanwhile_is_not_filled(root: Path) -> None:
    """Between the look at the folder and mkdir: it was not there, and then it was a stranger's."""
    layout = Layout(root.parent / "new")
    layout.root.mkdir()
    layout.root.chmod(0o777)
    plan: Any = type("Plan", (), {"layout": layout})
    with pytest.raises(UsageError, match="others may write"):
        cluster.write_files(plan, State(options=Options()))
    assert list(layout.root.iterdir()) == []


def test_ones_own_folder_in_tmp_is_fine_and_a_state_that_is_none_is_no_cluster(
    root: Path, capsys: Any
) -> None:
    ownership.check(root)
    assert cluster.running(Layout(root)).phase == "up"
    for text in ("null", "[" * 100_000, '{"format": 1}', ""):
        (root / "minicluster.json").write_text(text)
        assert cli.main(["status", "--dir", str(root)]) == 1
        assert capsys.readouterr().err.count("\n") == 1


NAME = locks.folder_name(Layout(Path("/tmp/jobkit-test-squatting")))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three places for locks, none of which is there."""
    made = [tmp_path / f"place{i}" / "locks" for i in range(3)]
    for place in made:
        place.parent.mkdir()
    monkeypatch.setattr(locks, "_folders", lambda: made)
    return made


def test_a_lock_is_held_by_one_and_no_stranger_can_take_its_name(places: list[Path]) -> None:
    with socket.socket(socket.AF_UNIX) as theirs, locks.held(NAME, ""):
        theirs.bind(f"\0jobkit-minicluster-{NAME}")
        with pytest.raises(ClusterError, match="busy"), locks.held(NAME, "busy"):
            pass
    with locks.held(NAME, "busy"):
        pass
    assert places[0].stat().st_mode & 0o777 == 0o700
    target = places[2].parent / "precious"
    target.write_text("x")
    (places[0] / "other").symlink_to(target)
    with pytest.raises(OSError), locks.held("other", "busy"):
        pass
    assert target.read_text() == "x"


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


@pytest.mark.parametrize(
    "squat", [open_to_all, lambda place: place.symlink_to(place.parent), Path.touch]
)
def test_a_place_for_locks_that_is_not_ones_own_is_passed_over(
    places: list[Path], squat: Callable[[Path], None]
) -> None:
    squat(places[0])
    assert locks.lock_folder() == places[1]
    places[1].rmdir()
    for place in places[1:]:
        squat(place)
    with pytest.raises(UsageError, match="no place for locks"):
        locks.lock_folder()


@as_root
def test_a_place_for_locks_of_a_strangers_is_passed_over(places: list[Path]) -> None:
    places[0].mkdir(mode=0o700)
    os.chown(places[0], STRANGER, STRANGER)
    assert locks.lock_folder() == places[1]
