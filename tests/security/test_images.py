"""Images that somebody else made: which formats are decoded, and how large they may be."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.payload.data import sources

Image = pytest.importorskip("PIL.Image")
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"


def tar_of(path: Path, blob: bytes) -> Path:
    """A tar with the same image for training and test."""
    with tarfile.open(path, "w") as tar:
        for part in ("train", "test"):
            member = tarfile.TarInfo(f"{part}/cat/1.png")
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))
    return path


def read(path: Path) -> Any:
    return sources.find_source(f"folder:{path}", path.parent, None, None).read(lambda line: None)


def encoded(kind: str, size: tuple[int, int] = (32, 32)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_the_usual_formats_are_read(tmp_path: Path, kind: str) -> None:
    train, _, classes = read(tar_of(tmp_path / "x.tar", encoded(kind)))
    assert train.images.shape == (1, 32, 32, 3) and classes == ["cat"]


def test_postscript_starts_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "gs"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    with pytest.raises(UsageError, match="not a readable image"):
        read(tar_of(tmp_path / "x.tar", EPS))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("size", [(4001, 4000), (1, 16_000_001)])
def test_an_image_that_would_take_too_much_memory_is_refused(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    with pytest.raises(UsageError, match="not a readable image"):
        read(tar_of(tmp_path / "x.tar", encoded("PPM", size)))


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_MOST_BYTES", 1000)
    with pytest.raises(UsageError, match="larger than"):
        read(tar_of(tmp_path / "x.tar", encoded("PPM")))
