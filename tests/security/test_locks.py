"""Lock files in a folder that others write to as well."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.launch import lock as launcher_lock
from jobkit.paths import StudyPaths
from jobkit.payload.data.cache import ensure_cache
from jobkit.payload.data.sources import find_source

PRECIOUS = "alias ll='ls -l'\n"


def build(folder: Path) -> None:
    ensure_cache(find_source("synthetic", folder, 8, 8), folder, lambda line: None)


def launch(folder: Path) -> None:
    with launcher_lock.held(StudyPaths(folder)):
        pass


DOORS: list[tuple[str, Callable[[Path], None]]] = [
    ("cache/synthetic-8-8-v1.lock", build),
    (".launcher.lock", launch),
]


@pytest.mark.parametrize(("name", "lock"), DOORS)
def test_a_link_in_the_place_of_a_lock_is_refused_and_its_file_kept(
    tmp_path: Path, name: str, lock: Callable[[Path], None]
) -> None:
    precious, shared = tmp_path / "bashrc", tmp_path / "shared"
    precious.write_text(PRECIOUS)
    place = shared / name
    place.parent.mkdir(parents=True)
    place.symlink_to(precious)
    with pytest.raises(UsageError):
        lock(shared)
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize(("name", "lock"), DOORS)
def test_a_dangling_link_makes_no_file_elsewhere(
    tmp_path: Path, name: str, lock: Callable[[Path], None]
) -> None:
    place = tmp_path / "shared" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        lock(tmp_path / "shared")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("name", "lock"), DOORS)
def test_a_fifo_or_a_folder_in_the_place_of_a_lock_is_refused(
    tmp_path: Path, name: str, lock: Callable[[Path], None]
) -> None:
    for make in (os.mkfifo, os.mkdir):
        place = tmp_path / make.__name__ / name
        place.parent.mkdir(parents=True)
        make(place)
        with pytest.raises(UsageError):
            lock(tmp_path / make.__name__)


@pytest.mark.parametrize(("name", "lock"), DOORS)
def test_a_lock_that_lies_there_keeps_its_content(
    tmp_path: Path, name: str, lock: Callable[[Path], None]
) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(PRECIOUS)
    lock(tmp_path)
    assert place.read_text() == PRECIOUS


def test_a_file_system_without_locks_takes_one_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS can be: the launch goes on, as the cache does."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    launch(tmp_path)


def test_what_is_downloaded_goes_to_a_new_file(tmp_path: Path) -> None:
    """The name of the part is not to be known beforehand: a link there would be written through."""
    from jobkit.payload.data import cifar10

    names = set()
    for _ in range(2):
        with cifar10.part_file(tmp_path) as (path, file):
            names.add(path)
            assert not path.is_symlink() and os.fstat(file.fileno()).st_nlink == 1
        assert not path.exists()
    assert len(names) == 2
