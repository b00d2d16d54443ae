"""A cluster's folder, or a lock, that a stranger made at a known name: neither is believed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minicluster import cli, locks, state
from minicluster.config import Options
from minicluster.layout import ClusterError, Layout, UsageError
from minicluster.processes import identify
from minicluster.state import State

STRANGER = 65534


def give(name: str) -> Callable[[Path], None]:
    return lambda root: os.chown(root / name, STRANGER, STRANGER)


def link(name: str) -> Callable[[Path], None]:
    def put(root: Path) -> None:
        (root / name).rename(root.parent / name)
        (root / name).symlink_to(root.parent / name)

    return put


# In a folder of one's own no stranger makes a file: those are tried with what reads them.
SQUATS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "everybody writes": ("down", lambda root: root.chmod(0o757)),
    "a group writes": ("up", lambda root: root.chmod(0o775)),
    "sticky": ("kill n1", lambda root: root.chmod(0o1777)),
    "its folder can be exchanged": ("start n1", lambda root: root.parent.chmod(0o777)),
    "a stranger's": ("env", give(".")),
    "also to end it": ("down", give(".")),
    "the state is a stranger's": ("kill n1", give("minicluster.json")),
    "a link": ("status", link("minicluster.json")),
    "the settings are a stranger's": ("env", give("slurm.conf")),
    "another link": ("start n1", link("slurm.conf")),
}


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def _never(*words: Any, **_: Any) -> None:
    raise AssertionError(f"started: {words}")


@pytest.fixture
def above(victim: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has a folder that looks like a cluster that is up, whose node n1 is the victim; our own."""
    monkeypatch.setattr("minicluster.machine.subprocess.run", _never)
    monkeypatch.setattr("minicluster.machine.survey", lambda options: None)
    made = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))  # short enough for Slurm's sockets
    layout = Layout(made / "mc")
    layout.root.mkdir(mode=0o755)
    process = identify("slurmd.n1", victim.pid)
    assert process
    state.save(layout, State(options=Options(), phase="up", processes=[process]))
    layout.slurm_conf.write_text("PluginDir=/tmp/evil\n")
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(("words", "squat"), SQUATS.values(), ids=SQUATS)
def test_a_folder_that_others_may_change_is_refused(above, victim, words, squat, capsys) -> None:
    root = above / "mc"
    assert state.running(Layout(root)).phase == "up"  # one's own folder in /tmp is fine
    if os.geteuid() != 0 and squat.__qualname__.startswith("give"):
        pytest.skip("only root can give a file away")
    squat(root)
    assert cli.main([*words.split(), "--dir", str(root)]) == 2
    said = capsys.readouterr()
    assert victim.poll() is None and said.err.count("\n") == 1 and "Plugin" not in said.out


def test_a_state_that_is_none_is_one_line(above: Path, capsys) -> None:
    for text in ("null", "[" * 100_000, '{"format": 1}', ""):
        (above / "mc" / "minicluster.json").write_text(text)
        assert cli.main(["status", "--dir", str(above / "mc")]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


@pytest.mark.parametrize(
    "squat", [open_to_all, lambda place: place.symlink_to(place.parent), Path.touch]
)
def test_a_lock_is_held_by_one_in_a_folder_of_ones_own(tmp_path, monkeypatch, squat) -> None:
    places = [tmp_path / f"place{i}" / "locks" for i in range(3)]
    for place in places:
        place.parent.mkdir()
    monkeypatch.setattr(locks, "_folders", lambda: places)
    squat(places[0])
    assert locks.lock_folder() == places[1]
    assert places[1].stat().st_mode & 0o777 == 0o700
    here = Layout(tmp_path)
    with locks.locked(here), pytest.raises(ClusterError, match="using"), locks.locked(here):
        pass
    (lock,) = places[1].iterdir()
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError), locks.locked(here):
        pass
    assert not (tmp_path / "precious").exists()
    shutil.rmtree(places[1])
    for place in places[1:]:
        squat(place)
    with pytest.raises(UsageError, match="no place for locks"):
        locks.lock_folder()
