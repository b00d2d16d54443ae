"""Lock files in a folder that others write to as well."""

import os
from pathlib import Path

import pytest

from jobkit.data.images import find_source, prepare
from jobkit.errors import UsageError
from jobkit.launch import local
from jobkit.paths import StudyPaths

PRECIOUS = "alias ll='ls -l'\n"


def build(folder: Path) -> None:
    prepare(*find_source("synthetic", folder, 8, 8), lambda line: None)


def launch(folder: Path) -> None:
    study, busy = StudyPaths(folder), pytest.raises(UsageError, match="being run by another")
    with local.held(study), busy, local.held(study):
        pass


@pytest.mark.parametrize(
    ("name", "lock"), [("cache/synthetic-8-8-v2.lock", build), (".launcher.lock", launch)]
)
def test_a_lock_writes_to_no_file_of_elsewhere(tmp_path, name, lock) -> None:
    """A link or a FIFO in its place is refused; what lies there keeps its content."""
    precious = tmp_path / "bashrc"
    precious.write_text(PRECIOUS)
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda place: place.symlink_to(precious)):
        make(place)
        with pytest.raises(UsageError):
            lock(tmp_path)
        place.unlink()
    precious.rename(place)
    lock(tmp_path)
    assert place.read_text() == PRECIOUS
