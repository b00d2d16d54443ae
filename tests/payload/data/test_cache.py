"""The prepared cache: whole or not there, built once, checked, and rebuilt when corrupt."""

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jobkit.errors import UsageError
from jobkit.payload.data.cache import cache_folder, ensure_cache, find_fault, open_cache
from jobkit.payload.data.images import Images, Say
from jobkit.payload.data.sources import Source, find_source, synthetic


class Counted:
    """A source of 300 + 40 images that counts how often it is read, slowly."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.reads, self.slow_s, self.said = 0, slow_s, []
        self.source = Source("counted", "counted", self.read)

    def read(self, say: Say) -> tuple[Images, Images, list[str]]:
        self.reads += 1
        time.sleep(self.slow_s)
        return synthetic(300, 40)

    def prepare(self, data_dir: Path) -> Path:
        return ensure_cache(self.source, data_dir, self.said.append)


def names(data_dir: Path) -> list[str]:
    return sorted(p.name for p in (data_dir / "cache").iterdir())


def test_a_cache_is_built_once_and_holds_the_source(tmp_path: Path) -> None:
    counted = Counted()
    folder = counted.prepare(tmp_path)
    assert counted.prepare(tmp_path) == folder
    assert counted.reads == 1
    assert find_fault(folder) == ""
    assert names(tmp_path) == ["counted-v1", "counted-v1.lock"]
    train, test, classes = synthetic(300, 40)
    data = open_cache(folder)
    assert torch.equal(data.train.images, train.images)
    assert torch.equal(data.test.labels, test.labels)
    assert data.classes == classes


def test_two_that_build_at_once_read_the_source_once(tmp_path: Path) -> None:
    counted = Counted(slow_s=0.5)
    threads = [threading.Thread(target=counted.prepare, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.reads == 1
    assert find_fault(cache_folder(counted.source, tmp_path)) == ""


@pytest.mark.parametrize("file", ["train_images", "test_labels", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_broken_cache_is_seen_and_built_anew(tmp_path: Path, file: str, how: str) -> None:
    counted = Counted()
    path = counted.prepare(tmp_path) / file
    blob = bytearray(path.read_bytes())
    if how == "flip":
        blob[len(blob) // 2] ^= 0xFF
    path.unlink()
    if how != "remove":
        path.write_bytes(blob if how == "flip" else blob[: len(blob) // 2])
    folder = counted.prepare(tmp_path)
    assert counted.reads == 2
    assert any("is corrupt" in line for line in counted.said)
    assert find_fault(folder) == ""


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "cache" / ".counted-v1.abc123"
    left.mkdir(parents=True)
    (left / "train_images").write_bytes(b"half")
    Counted().prepare(tmp_path)
    assert names(tmp_path) == ["counted-v1", "counted-v1.lock"]


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Writes beyond so many bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1000, 300 * 3072 - 1, 300 * 3072 + 5])
def test_a_full_disk_leaves_no_half_cache(tmp_path: Path, size: int) -> None:
    counted = Counted()
    (tmp_path / "cache").mkdir()
    if size > 300 * 3072:  # the large file fits: the next one shall not
        counted.source = Source("counted", "", lambda say: synthetic(40, 301))
    with no_file_above(size), pytest.raises(UsageError) as caught:
        counted.prepare(tmp_path)
    assert "the cache cannot be written: " in str(caught.value)
    assert "free some space, or choose another directory with --data-dir" in str(caught.value)
    assert names(tmp_path) == ["counted-v1.lock"]
    assert find_fault(counted.prepare(tmp_path)) == ""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk here")
    try:
        counted = Counted()
        with pytest.raises(UsageError, match="cannot be written: No space left on device"):
            counted.prepare(disk)
        assert names(disk) == ["counted-v1.lock"]
        remount = ["mount", "-o", "remount,size=5m", str(disk)]
        subprocess.run(remount, check=True)
        assert find_fault(counted.prepare(disk)) == ""
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_place_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        Counted().prepare(tmp_path / "file")


def test_samples_are_taken_evenly_from_sorted_sources(tmp_path: Path) -> None:
    images = torch.zeros(100, 32, 32, 3, dtype=torch.uint8)
    labels = torch.arange(100) // 10  # class by class, as a folder lies
    source = Source("sorted", "", lambda say: (Images(images, labels),) * 2 + (["x"] * 10,))  # type: ignore[arg-type, return-value]
    folder = ensure_cache(source, tmp_path, print)
    data = open_cache(folder, 30, 10)
    assert torch.bincount(data.train.labels).tolist() == [3] * 10
    assert torch.bincount(data.test.labels).tolist() == [1] * 10
    with pytest.raises(UsageError, match="--test-samples 101: there are only 100"):
        open_cache(folder, None, 101)


def test_a_folder_that_changes_is_another_source(images: Path, tmp_path: Path) -> None:
    keys = [find_source(f"folder:{images}", tmp_path, None, None).key]
    os.utime(images / "train/cat/0001.png", (1, 1))
    keys.append(find_source(f"folder:{images}", tmp_path, None, None).key)
    (images / "test/dog/0009.png").write_bytes((images / "test/dog/0000.png").read_bytes())
    keys.append(find_source(f"folder:{images}", tmp_path, None, None).key)
    assert len(set(keys)) == 3
