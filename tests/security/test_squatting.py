"""Names that a stranger takes first: a lock that is for one user is out of the others' reach."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from minicluster import locks
from minicluster.errors import ClusterError, UsageError
from minicluster.layout import Layout

NAME = locks.folder_name(Layout(Path("/tmp/jobkit-test-squatting")))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three places for locks, none of which is there."""
    made = [tmp_path / f"place{i}" / "locks" for i in range(3)]
    for place in made:
        place.parent.mkdir()
    monkeypatch.setattr(locks, "_folders", lambda: made)
    return made


def test_a_stranger_who_binds_the_name_of_a_lock_blocks_nobody() -> None:
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(f"\0jobkit-minicluster-{NAME}")
        with locks.held(NAME, "busy"):
            pass


def test_a_lock_is_held_by_one(places: list[Path]) -> None:
    with (
        locks.held(NAME, ""),
        pytest.raises(ClusterError, match="busy"),
        locks.held(NAME, "busy"),
    ):
        pass
    assert places[0].stat().st_mode & 0o777 == 0o700


def strangers(place: Path) -> None:
    place.mkdir()
    if os.geteuid() == 0:
        os.chown(place, 65534, 65534)
    else:
        place.chmod(0o777)


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def link(place: Path) -> None:
    place.symlink_to(place.parent)


@pytest.mark.parametrize("squat", [strangers, open_to_all, link, Path.touch])
def test_a_folder_that_is_not_ones_own_is_passed_over(places: list[Path], squat: object) -> None:
    squat(places[0])  # type: ignore[operator]
    assert locks.lock_folder() == places[1]
    for place in places[1:]:
        with contextlib.suppress(OSError):
            place.rmdir()
        squat(place)  # type: ignore[operator]
    with pytest.raises(UsageError, match="no place for locks"):
        locks.lock_folder()


def test_a_link_in_the_place_of_a_lock_is_not_followed(places: list[Path]) -> None:
    target = places[2].parent / "precious"
    target.write_text("x")
    (locks.lock_folder() / NAME).symlink_to(target)
    with pytest.raises(OSError), locks.held(NAME, "busy"):
        pass
    assert target.read_text() == "x"
