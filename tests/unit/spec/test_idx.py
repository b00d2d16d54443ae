"""IDX files that cannot be used: whatever their heads promise, one line, and not much memory."""

import gzip
import os
from pathlib import Path

import pytest

from jobkit.errors import UsageError
from jobkit.spec import idx
from jobkit.spec.dataset import check_source
from jobkit.spec.runspec import RunSpec
from support.idx_files import idx_bytes, write_idx


@pytest.mark.parametrize("packed", [True, False])
def test_a_whole_data_set_is_taken(tmp_path: Path, packed: bool) -> None:
    folder = write_idx(tmp_path / "mnist", packed)
    check_source(f"idx:{folder}")
    shape, content = idx.read(idx.find(folder)["train_images"], 3)
    assert shape == (30, 28, 28) and len(content) == 30 * 28 * 28
    assert RunSpec(dataset=f"idx:{folder}").dataset == f"idx:{folder}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no head"),
        (b"\0\0\x08\x03\0\0", "it has no head"),
        (b"PK" + idx_bytes(1, 2, 2)[2:], "it has no head"),
        (idx_bytes(1, 2, 2, kind=13), "it is not unsigned bytes in 3 dimensions"),
        (idx_bytes(4), "it has no head"),
        (idx_bytes(1, 2, 2, 2), "it is not unsigned bytes in 3 dimensions"),
        (idx_bytes(0, 2, 2), "it is empty"),
        (idx_bytes(3, 2, 2, content=b"x" * 11), "12 bytes promised by its head, 11 there"),
        (idx_bytes(3, 2, 2, content=b"x" * 13), "12 bytes promised by its head, more there"),
        (idx_bytes(2**32 - 1, 2**32 - 1, 2**32 - 1, content=b""), "its head promises "),
        (idx_bytes(2**20, 32, 31, content=b"x"), "1,040,187,392 bytes promised"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_a_file_that_is_not_what_it_says_is_refused(
    tmp_path: Path, content: bytes, message: str, packed: bool
) -> None:
    path = tmp_path / ("f.gz" if packed else "f")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UsageError) as caught:
        idx.read(path, 3)
    said = str(caught.value)
    assert message in said and str(path) in said and "\n" not in said


def test_a_torn_or_bloated_archive_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.gz"
    path.write_bytes(gzip.compress(idx_bytes(3, 2, 2))[:-9])
    with pytest.raises(UsageError, match="not a readable IDX file"):
        idx.read(path, 3)
    path.write_bytes(b"no archive at all")
    with pytest.raises(UsageError, match="not a readable IDX file"):
        idx.read(path, 3)
    path.write_bytes(gzip.compress(idx_bytes(3, 2, 2) + bytes(50 << 20)))  # 50 MiB of zeros
    with pytest.raises(UsageError, match="more there"):
        idx.read(path, 3)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        idx.read(tmp_path / "fifo", 3)


def test_a_folder_without_them_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory of IDX files"):
        check_source(f"idx:{tmp_path}/absent")
    with pytest.raises(UsageError, match="idx: needs a path"):
        check_source("idx:")
    folder = write_idx(tmp_path / "mnist")
    (folder / idx.FILES["test_labels"]).unlink()
    with pytest.raises(UsageError, match=r"has no t10k-labels-idx1-ubyte or .*\.gz"):
        check_source(f"idx:{folder}")
