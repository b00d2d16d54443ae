"""Image folders and tars that cannot be used, as the login node sees it: without torch."""

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.spec.dataset import check_source, folder_path


def folders(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)


def absent(root: Path) -> None:
    pass


def empty_folder(root: Path) -> None:
    root.mkdir()


def no_test(root: Path) -> None:
    folders(root, "train/a")


def classes_differ(root: Path) -> None:
    folders(root, "train/a", "train/b", "test/a", "test/c")


def empty_file(root: Path) -> None:
    root.touch()


def no_tar(root: Path) -> None:
    root.write_bytes(b"This is not a tar." * 100)


def compressed_tar(root: Path) -> None:
    with tarfile.open(root, "w:gz") as tar:
        tar.add(__file__, arcname="train/a/0.png")


def empty_tar(root: Path) -> None:
    tarfile.open(root, "w").close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (absent, "no such directory or .tar of images"),
        (empty_folder, "no class folder in train/"),
        (no_test, "no class folder in test/"),
        (classes_differ, "class folders differ: b only in train/, c only in test/"),
        (empty_file, "not a readable .tar"),
        (no_tar, "not a readable .tar"),
        (compressed_tar, "a compressed one: unpack it to a .tar first"),
        (empty_tar, "the .tar is empty"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    root = tmp_path / "my images"
    make(root)
    with pytest.raises(UsageError) as caught:
        check_source(f"folder:{root}")
    assert str(caught.value).startswith(f"{root}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_good_folder_and_other_sources_pass(tmp_path: Path) -> None:
    folders(tmp_path, "train/a", "train/b", "test/a", "test/b")
    (tmp_path / "train" / "README").touch()
    check_source(f"folder:{tmp_path}")
    check_source("synthetic")
    assert folder_path("cifar10") is None


def test_a_folder_without_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="folder: needs a path"):
        check_source("folder:")
