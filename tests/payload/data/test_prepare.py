"""Preparing data on a login node, and reading CIFAR-10 as it is published."""

import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from jobkit.errors import UsageError
from jobkit.payload.data import cifar10
from jobkit.payload.data.prepare import main


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


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("cifar", "unknown dataset 'cifar'; did you mean 'cifar10'?"),
        ("folder:/no/such", "/no/such: no such directory or .tar of images"),
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


def test_synthetic_needs_no_preparation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", "synthetic"]) == 0
    assert "nothing to prepare" in capsys.readouterr().out


def published(root: Path, per_batch: int = 20) -> Path:
    """A small archive in CIFAR-10's own form."""
    numpy = pytest.importorskip("numpy")
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for at, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels = numpy.full((per_batch, 3072), at, dtype=numpy.uint8)
        pixels[:, :1024] = 200  # the red plane
        labels = [(at + i) % 10 for i in range(per_batch)]
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2))
    with tarfile.open(root / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return folder


@pytest.mark.parametrize("unpacked", [True, False])
def test_cifar10_is_read_from_either_form(tmp_path: Path, unpacked: bool) -> None:
    folder = published(tmp_path)
    if not unpacked:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    train, test, classes = cifar10.read(tmp_path, print, download=False)
    assert (train.images.shape, test.images.shape) == ((100, 32, 32, 3), (20, 32, 32, 3))
    assert classes[3] == "cat"
    assert train.labels[20:24].tolist() == [1, 2, 3, 4]
    assert train.images[25, 7, 9].tolist() == [200, 1, 1]
    assert test.images.dtype == torch.uint8


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by a pickle",))


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps(Evil())])
def test_a_broken_or_hostile_file_is_refused(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published(tmp_path)
    (folder / "data_batch_3").write_bytes(content)
    with pytest.raises(UsageError, match=r"is corrupt .*: delete it and prepare it again"):
        cifar10.read(tmp_path, print, download=False)
    assert "run by a pickle" not in capsys.readouterr().out


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
