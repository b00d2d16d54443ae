"""Sources of images and the cache made of them: whole or not there, built once, checked."""

import hashlib
import os
import pickle
import resource
import shutil
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from jobkit.errors import UsageError
from jobkit.payload.data import cifar10
from jobkit.payload.data.cache import cache_folder, ensure_cache, find_fault, open_cache
from jobkit.payload.data.images import Images, Say
from jobkit.payload.data.prepare import main
from jobkit.payload.data.sources import Source, find_source, synthetic
from jobkit.spec import idx
from support.idx_files import idx_bytes, write_idx


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
    left = tmp_path / "cache" / ".counted-v1.abc123"  # by a builder that was killed
    left.mkdir(parents=True)
    (left / "train_images").write_bytes(b"half")
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


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *(("train_images", "flip"), ("test_labels", "flip"), ("train_images", "cut")),
        *(("test_labels", "remove"), ("manifest.json", "cut"), ("manifest.json", "remove")),
    ],
)
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


@pytest.mark.parametrize("name", ["train_images", "test_labels"])
def test_a_file_that_was_cut_since_is_an_error_and_no_signal(tmp_path: Path, name: str) -> None:
    folder = Counted().prepare(tmp_path)
    os.truncate(folder / name, 8)
    with pytest.raises(UsageError, match="another size"):
        open_cache(folder)


def test_a_link_in_the_place_of_a_cache_is_not_removed_through(tmp_path: Path) -> None:
    folder = Counted().prepare(tmp_path)
    precious = tmp_path / "home" / "precious"
    precious.parent.mkdir()
    precious.touch()
    folder.rename(folder.with_name("was"))
    folder.symlink_to(precious.parent)
    with pytest.raises(UsageError):
        Counted().prepare(tmp_path)
    assert precious.exists()


@pytest.mark.parametrize("size", [0, 300 * 3072 - 1, 300 * 3072 + 5])
def test_a_full_disk_leaves_no_half_cache(tmp_path: Path, size: int) -> None:
    counted = Counted()
    (tmp_path / "cache").mkdir()
    if size > 300 * 3072:  # the large file fits: the next one shall not
        counted.source = Source("counted", "", lambda say: synthetic(40, 301))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # writes beyond it fail
    try:
        with pytest.raises(UsageError, match="the cache cannot be written: ") as caught:
            counted.prepare(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "free some space, or choose another directory with --data-dir" in str(caught.value)
    assert names(tmp_path) == ["counted-v1.lock"]
    assert find_fault(counted.prepare(tmp_path)) == ""


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
    def key() -> str:
        return find_source(f"folder:{images}", tmp_path, None, None).key

    keys = [key()]
    os.utime(images / "train/cat/0001.png", (1, 1))
    keys.append(key())
    (images / "test/dog/0009.png").write_bytes((images / "test/dog/0000.png").read_bytes())
    assert len({*keys, key()}) == 3


def test_grey_images_get_a_border_and_three_equal_channels(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mnist", packed=True)
    source = find_source(f"idx:{folder}", tmp_path / "data", None, None)
    data = open_cache(ensure_cache(source, tmp_path / "data", lambda _: None))
    assert data.train.images.shape == (30, 32, 32, 3) and len(data.test.labels) == 10
    assert data.classes == [str(i) for i in range(10)]
    image = data.train.images[1]
    expected = torch.arange(784, 2 * 784).remainder(10).reshape(28, 28).to(torch.uint8)
    assert torch.equal(image[2:30, 2:30, 0], expected)
    assert not image[:2].any() and not image[:, 30:].any()
    assert torch.equal(image[..., 0], image[..., 2])
    assert data.train.labels[:12].tolist() == [*range(10), 0, 1]
    folder = write_idx(tmp_path / "small", side=8)
    train, _, _ = find_source(f"idx:{folder}", tmp_path, None, None).read(lambda _: None)
    assert train.images.shape == (30, 32, 32, 3)  # scaled
    assert 0 <= int(train.images.min()) < int(train.images.max()) <= 9


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("train_labels", idx_bytes(29), "30 images, and 29 labels"),
        ("test_images", idx_bytes(10, 300, 1), "10 images of 300 x 1, more than"),
        ("train_images", idx_bytes(2_000_001, 1, 1, content=bytes(2_000_001)), "and 30 labels"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    tmp_path: Path, part: str, content: bytes, message: str
) -> None:
    folder = write_idx(tmp_path / "mnist")
    (folder / idx.FILES[part]).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        find_source(f"idx:{folder}", tmp_path, None, None).read(lambda _: None)


def test_a_folder_is_prepared_once_and_the_next_step_is_named(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dataset", f"folder:{images}", "--data-dir", str(tmp_path / "my data")]
    assert main(words) == 0
    first = capsys.readouterr().out
    (folder,) = (tmp_path / "my data" / "cache").glob("folder-*-v1")
    assert f"\nprepared: {folder}\n" in first
    assert "  12 training and 12 test images, 2 classes, 0.1 MB\n" in first
    assert f"next: bash run.sh --dataset folder:{images} --data-dir '{tmp_path}/my data'" in first
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"already prepared: {folder}\n")
    assert main(["--dataset", "synthetic"]) == 0
    assert "nothing to prepare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("cifar", "unknown dataset 'cifar'; did you mean 'cifar10'?"),
        ("folder:/no/such", "/no/such: no such directory of images"),
    ],
)
def test_what_cannot_be_prepared_is_one_line(
    dataset: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dataset", dataset, "--data-dir", str(tmp_path / "data")]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"jobkit: error: {message}")
    assert (out, err.count("\n")) == ("", 1)
    assert not (tmp_path / "data").exists()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive in CIFAR-10's own form, which is taken for the published one."""
    sums = dict[str, str]()
    monkeypatch.setattr(cifar10, "_published", lambda: sums)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for at, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels = numpy.full((20, 3072), at, dtype=numpy.uint8)
        pixels[:, :1024] = 200  # the red plane
        labels = [(at + i) % 10 for i in range(20)]
        content = pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2)
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
    pack(folder)
    return folder


def pack(folder: Path) -> None:
    with tarfile.open(folder.parent / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(folder, arcname=folder.name)


@pytest.mark.parametrize("unpacked", [True, False])
def test_cifar10_is_read_from_either_form(tmp_path: Path, published: Path, unpacked: bool) -> None:
    if not unpacked:
        shutil.rmtree(published)
    train, test, classes = cifar10.read(tmp_path, print, download=False)
    assert (train.images.shape, test.images.shape) == ((100, 32, 32, 3), (20, 32, 32, 3))
    assert classes[3] == "cat"
    assert train.labels[20:24].tolist() == [1, 2, 3, 4]
    assert train.images[25, 7, 9].tolist() == [200, 1, 1]
    assert test.images.dtype == torch.uint8


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by a pickle",))


@pytest.mark.parametrize("unpacked", [True, False])
def test_what_is_not_the_published_file_is_not_unpickled(
    tmp_path: Path, published: Path, unpacked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (published / "data_batch_3").write_bytes(pickle.dumps(Evil()))
    if not unpacked:
        pack(published)
        shutil.rmtree(published)
    text = r"is corrupt .data_batch_3 is not the published file.: delete it and prepare it again"
    with pytest.raises(UsageError, match=text):
        cifar10.read(tmp_path, print, download=False)
    assert "run by a pickle" not in capsys.readouterr().out


def test_an_archive_that_is_none_is_told(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(b"junk")
    with pytest.raises(UsageError, match="is corrupt"):
        cifar10.read(tmp_path, print, download=False)
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("cifar-10-batches-py/data_batch_1"))
    with pytest.raises(UsageError, match="data_batch_1 is not the published file"):
        cifar10.read(tmp_path, print, download=False)


def test_a_download_with_a_wrong_checksum_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import CIFAR10

    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(b"x" * 3_000_000)
    monkeypatch.setattr(CIFAR10, "url", wrong.as_uri())
    said: list[str] = []
    with pytest.raises(UsageError, match=r"came with a wrong checksum .* jobkit prepare"):
        cifar10.read(tmp_path / "data", said.append)
    assert list((tmp_path / "data").iterdir()) == []
    assert said[-1] == "  3 of 3 MB"
