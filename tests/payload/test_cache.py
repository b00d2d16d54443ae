"""Sources of images and the prepared file made of them: whole or not there, made once."""

import hashlib
import os
import pickle
import resource
import shutil
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from jobkit.data import images as sources
from jobkit.data.images import Images, find_source, open_prepared, prepare, synthetic
from jobkit.data.prepare import main
from jobkit.errors import UsageError
from jobkit.payload.data import limited
from jobkit.spec.dataset import IDX_FILES
from support.idx_files import idx_bytes, write_idx
from support.refusals import error_of, refusal


class Counted:
    """A source of 300 + 40 images that counts how often it is read, slowly."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.reads, self.slow_s, self.said = 0, slow_s, []

    def read(self, say: sources.Say) -> sources.Dataset:
        self.reads += 1
        time.sleep(self.slow_s)
        return synthetic(300, 40)

    def prepare(self, data_dir: Path) -> Path:
        return prepare(data_dir / "cache" / "counted.pt", self.read, self.said.append)


def test_a_source_is_read_once_by_all_that_need_it(tmp_path: Path) -> None:
    counted = Counted(slow_s=0.3)
    with ThreadPoolExecutor(4) as pool:
        (path,) = {*pool.map(counted.prepare, [tmp_path] * 4)}
    assert counted.prepare(tmp_path) == path and counted.reads == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["counted.lock", "counted.pt"]
    data, source = open_prepared(path), synthetic(300, 40)
    assert torch.equal(data.train.images, source.train.images)
    assert torch.equal(data.test.labels, source.test.labels)
    assert data.classes == source.classes


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by a pickle",))


def test_a_damaged_file_is_seen_and_made_anew(tmp_path, capsys) -> None:
    counted = Counted()
    path = counted.prepare(tmp_path)
    whole, parts = path.read_bytes(), torch.load(path, weights_only=True)
    other = tmp_path / "other.pt"
    labels = [torch.full((300,), 10**9), parts["labels"][1]]
    for content, why in (
        (parts | {"labels": labels}, "a label that is no class"),
        (parts | {"images": parts["images"][::-1]}, "images of another shape"),
        ({}, "images"),
        (Evil(), "Weights only load failed"),
        (whole[: len(whole) // 2], "failed finding central directory"),
    ):
        torch.save(content, other) if not isinstance(content, bytes) else other.write_bytes(content)
        path.unlink()  # it is mapped: what has it open keeps it
        shutil.copy(other, path)
        with pytest.raises(UsageError, match=f"is damaged .*{why}.*: remove it"):
            open_prepared(path)
    assert counted.prepare(tmp_path) == path and counted.reads == 2
    assert path.read_bytes() == whole
    assert "preparing it again" in counted.said[-2]
    assert "run by a pickle" not in capsys.readouterr().out


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    counted, size = Counted(), 300 * 3072 - 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "cache").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # writes beyond it fail
    try:
        with pytest.raises(UsageError, match=r"counted.pt cannot be written: .*--data-dir"):
            counted.prepare(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["counted.lock"]


def test_samples_are_taken_evenly_from_sorted_sources() -> None:
    part = Images(torch.zeros(100, 32, 32, 3, dtype=torch.uint8), torch.arange(100) // 10)
    assert torch.bincount(limited(part, 30, "train").labels).tolist() == [3] * 10
    with pytest.raises(UsageError, match="--test-samples 101: there are only 100"):
        limited(part, 101, "test")


def test_a_folder_that_changes_is_another_source(images: Path, tmp_path: Path) -> None:
    def file() -> Path:
        return find_source(f"folder:{images}", tmp_path, None, None)[0]

    files = [file()]
    os.utime(images / "train/cat/0001.png", (1, 1))
    files.append(file())
    (images / "test/dog/0009.png").write_bytes((images / "test/dog/0000.png").read_bytes())
    assert len({*files, file()}) == 3


@pytest.mark.parametrize("packed", [True, False])
def test_grey_images_get_a_border_and_three_equal_channels(tmp_path: Path, packed: bool) -> None:
    folder = write_idx(tmp_path / "mnist", packed=packed)
    source = find_source(f"idx:{folder}", tmp_path / "data", None, None)
    data = open_prepared(prepare(*source, lambda _: None))
    assert data.train.images.shape == (30, 32, 32, 3) and len(data.test.labels) == 10
    assert data.classes == [str(i) for i in range(10)]
    image = data.train.images[1]
    expected = torch.arange(784, 2 * 784).remainder(10).reshape(28, 28).to(torch.uint8)
    assert torch.equal(image[2:30, 2:30, 0], expected)
    assert not image[:2].any() and not image[:, 30:].any()
    assert torch.equal(image[..., 0], image[..., 2])
    assert data.train.labels[:12].tolist() == [*range(10), 0, 1]


def test_idx_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    for part, content, message in (
        ("train_labels", idx_bytes(29), "30 images .*, and 29 labels"),
        ("test_images", idx_bytes(10, 8, 1), "10 images of 8 x 1 pixels"),
        ("train_labels", idx_bytes(30, kind=13), "it is not bytes in 1 dimensions"),
        ("train_images", idx_bytes(30, 28, 28, content=b"x" * 99999), "not a whole IDX file"),
    ):
        folder = write_idx(tmp_path / "mnist")
        (folder / IDX_FILES[part]).write_bytes(content)
        with pytest.raises(UsageError, match=message):
            find_source(f"idx:{folder}", tmp_path, None, None)[1](lambda _: None)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"


def test_images_of_a_few_kinds_and_any_size_are_decoded(images: Path, tmp_path: Path) -> None:
    """PostScript would start an interpreter."""
    from PIL import Image

    path = images / "train/cat/0001.png"
    Image.new("RGB", (50, 40)).save(path, "JPEG")
    _, read = find_source(f"folder:{images}", tmp_path, None, None)
    assert read(lambda _: None).train.images.shape == (12, 32, 32, 3)
    path.write_bytes(EPS)
    assert "0001.png: not a readable image" in error_of(read, lambda _: None)


def test_a_folder_is_prepared_once(images, tmp_path, capsys) -> None:
    words = ["--dataset", f"folder:{images}", "--data-dir", str(tmp_path / "my data")]
    assert main(words) == 0
    first = capsys.readouterr().out
    (path,) = (tmp_path / "my data" / "cache").glob("folder-*-v2.pt")
    assert f"{path}: 12 training and 12 test images\n" in first
    data = open_prepared(path)
    assert data.classes == ["cat", "dog"] and data.train.labels.tolist() == [0] * 6 + [1] * 6
    assert torch.equal(data.train.images[:, 0, 0, 0].long(), 40 + 150 * data.train.labels)
    assert main(words) == 0
    assert capsys.readouterr().out == f"{path}: 12 training and 12 test images\n"
    for dataset, line in (
        ("cifar", "unknown dataset 'cifar'; did you mean 'cifar10'?"),
        ("folder:/no/such", "/no/such: no such directory of images"),
    ):
        words = ["--dataset", dataset, "--data-dir", str(tmp_path / "no data")]
        assert refusal(main, words, capsys).startswith(f"jobkit: error: {line}")
    assert not (tmp_path / "no data").exists()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive in CIFAR-10's own form, which is taken for the published one."""
    from torchvision.datasets import CIFAR10

    def md5(path: Path) -> str:
        return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()

    folder, archive = tmp_path / CIFAR10.base_folder, tmp_path / CIFAR10.filename
    folder.mkdir()
    for at, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels = numpy.full((20, 3072), at, dtype=numpy.uint8)
        pixels[:, :1024] = 200  # the red plane
        content = {"data": pixels, "labels": [(at + i) % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = folder / CIFAR10.meta["filename"]
    meta.write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, protocol=2))
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    for which in ("train_list", "test_list"):
        files = [[name, md5(folder / name)] for name, _ in getattr(CIFAR10, which)]
        monkeypatch.setattr(CIFAR10, which, files)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5(meta)})
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive))
    monkeypatch.setattr(CIFAR10, "url", "file:///no/such")
    return folder


@pytest.mark.parametrize("unpacked", [True, False])
def test_cifar10_is_read_from_either_form(tmp_path: Path, published: Path, unpacked: bool) -> None:
    if not unpacked:
        shutil.rmtree(published)
    data = sources.read_cifar10(tmp_path)
    assert (data.train.images.shape, len(data.test.labels)) == ((100, 32, 32, 3), 20)
    assert data.classes[3] == "d"
    assert data.train.labels[20:24].tolist() == [1, 2, 3, 4]
    assert data.train.images[25, 7, 9].tolist() == [200, 1, 1]
    assert data.test.images.dtype == torch.uint8


def test_what_is_not_the_published_file_is_not_unpickled(tmp_path, published, capsys) -> None:
    (published / "data_batch_3").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match=r"corrupt there, and is not downloaded in a dry run"):
        sources.read_cifar10(tmp_path, download=False)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"junk")
    line = r"corrupt there, and cannot be downloaded .*: on a machine with network access run 'pyth"
    with pytest.raises(UsageError, match=line):
        sources.read_cifar10(tmp_path)
    assert "run by a pickle" not in capsys.readouterr().out
