"""Image folders and IDX files that cannot be used, as the login node sees it: without torch."""

import gzip
import os
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.spec import idx
from jobkit.spec.dataset import check_source, folder_path
from jobkit.spec.runspec import RunSpec
from support.idx_files import idx_bytes, write_idx


def refusal(source: str) -> str:
    with pytest.raises(UsageError) as caught:
        check_source(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    root = tmp_path / "my images"
    assert refusal(f"folder:{root}").startswith(f"{root}: no such directory")
    for folder, message in (
        ("", "no class folder in train/"),
        ("train/a", "no class folder in test/"),
        ("test/c", "class folders differ: a only in train/, c only in test/"),
    ):
        (root / folder).mkdir(parents=True)
        assert refusal(f"folder:{root}").startswith(f"{root}: {message}")


def test_good_sources_pass_and_what_is_no_folder_is_told(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "train" / "README").touch()
    for source in (f"folder:{tmp_path}", "synthetic"):
        check_source(source)
    assert folder_path("cifar10") is None
    (tmp_path / "images.tar").touch()
    folder = write_idx(tmp_path / "mnist")
    (folder / idx.FILES["test_labels"]).unlink()
    for source, message in (
        (f"folder:{tmp_path}/images.tar", "no such directory of images; unpack it first"),
        ("folder:", "folder: needs a path"),
        (f"idx:{tmp_path}/absent", "no such directory of IDX files"),
        ("idx:", "idx: needs a path"),
        (f"idx:{folder}", "has no t10k-labels-idx1-ubyte or "),
    ):
        assert message in refusal(source)


@pytest.mark.parametrize("packed", [True, False])
def test_a_whole_set_of_idx_files_is_taken(tmp_path: Path, packed: bool) -> None:
    folder = write_idx(tmp_path / "mnist", packed)
    check_source(f"idx:{folder}")
    shape, content = idx.read(idx.find(folder)["train_images"], 3)
    assert shape == (30, 28, 28) and len(content) == 30 * 28 * 28
    assert RunSpec(dataset=f"idx:{folder}").dataset == f"idx:{folder}"


def test_a_file_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    path, packed, whole = tmp_path / "f", tmp_path / "f.gz", idx_bytes(3, 2, 2)
    for content, message in (
        (b"\0\0\x08\x03\0\0", "it has no head"),
        (b"PK" + idx_bytes(1, 2, 2)[2:], "it has no head"),
        (idx_bytes(1, 2, 2, kind=13), "it is not unsigned bytes in 3 dimensions"),
        (idx_bytes(1, 2, 2, 2), "it is not unsigned bytes in 3 dimensions"),
        (idx_bytes(0, 2, 2), "it is empty"),
        (idx_bytes(3, 2, 2, content=b"x" * 11), "12 bytes promised by its head, 11 there"),
        (idx_bytes(3, 2, 2, content=b"x" * 13), "12 bytes promised by its head, more there"),
        (idx_bytes(2**32 - 1, 2**32 - 1, 2**32 - 1, content=b""), "its head promises "),
    ):
        path.write_bytes(content)
        packed.write_bytes(gzip.compress(content))
        for file in (path, packed):
            with pytest.raises(UsageError, match=f"{file}: .*{message}"):
                idx.read(file, 3)
    for content, message in (
        (gzip.compress(whole)[:-9], "not a readable IDX file"),
        (b"no archive at all", "not a readable IDX file"),
        (gzip.compress(whole + bytes(50 << 20)), "more there"),  # 50 MiB of zeros
    ):
        packed.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            idx.read(packed, 3)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        idx.read(tmp_path / "fifo", 3)
