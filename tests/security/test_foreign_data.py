"""Data, caches and checkpoints that somebody else made: used as what was checked, or refused."""

import hashlib
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.payload.data import cache as caches
from jobkit.payload.data import cifar10, sources
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.single import Single
from jobkit.spec.runspec import RunSpec
from support.hostile import in_child

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A forked child has none of its parent's threads, and would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(pixels: Any = None, labels: Any = (0, 0)) -> bytes:
    """A batch in the form of the published ones."""
    made = numpy.zeros((2, 3072), dtype=numpy.uint8) if pixels is None else pixels
    return pickle.dumps({b"data": made, b"labels": list(labels)}, protocol=2)


def test_a_member_that_is_far_too_large_is_not_unpacked(tmp_path: Path) -> None:
    member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    member.size = 1 << 40
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.fileobj.write(member.tobuf())  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="far too large"):
        cifar10.read(tmp_path, print, download=False)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of 20 + 20 images of 10 classes."""
    source = sources.find_source("synthetic", tmp_path, 20, 20)
    return caches.ensure_cache(source, tmp_path, lambda _: None)


def resealed(cache: Path, name: str, content: bytes) -> None:
    """Replace a file, with its checksum."""
    (cache / name).write_bytes(content)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
    (cache / "manifest.json").write_text(json.dumps(manifest))


def edited(**changes: Any) -> Callable[[Path], object]:
    def edit(cache: Path) -> None:
        path = cache / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def labels(*values: int) -> bytes:
    return bytes(torch.tensor(values, dtype=torch.int64).numpy().tobytes())


def no_file(cache: Path) -> None:
    (cache / "train_images").unlink()
    (cache / "train_images").symlink_to("/dev/zero")


SPOILT: dict[str, Callable[[Path], object]] = {
    "no checksums": edited(sha256={}),
    "a huge count": edited(counts={"train": 2**70, "test": 20}),
    "no object": lambda cache: (cache / "manifest.json").write_bytes(b"[" * 100_000),
    "a label that is no class": lambda c: resealed(c, "train_labels", labels(10**9, *[0] * 19)),
    "too few labels": lambda cache: resealed(cache, "train_labels", labels(*[0] * 19)),
    "another byte": lambda cache: (cache / "test_labels").write_bytes(labels(*[1] * 20)),
    "no file": no_file,
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_cache_that_was_changed_is_found_at_fault(cache: Path, kind: str) -> None:
    assert caches.find_fault(cache) == ""
    SPOILT[kind](cache)
    done = in_child(lambda: caches.find_fault(cache))
    assert done.faults == [] and done.code


def test_the_compilers_cache_is_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's default in /tmp anybody can make first, and leave pickles there."""
    spec = RunSpec(strategy="single", model="mlp", device="cpu", compile=True)

    def setup() -> None:
        Single(spec, RankEnv(), torch.device("cpu")).setup(build_model(spec, 10))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    setup()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    setup()
    own = tmp_path / f"jobkit-{os.geteuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{own}/torchinductor"
    assert own.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(own)
    own.symlink_to(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(UsageError, match="is a link: remove it"):
        setup()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "EPS", "pixels", "bytes"])
def test_images_of_a_few_kinds_and_sizes_are_decoded(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostScript would start an interpreter; a few bytes may decode to gigabytes."""
    image = pytest.importorskip("PIL.Image")
    blob, size = io.BytesIO(EPS), (4001, 4000) if kind == "pixels" else (32, 32)
    if kind != "EPS":
        image.new("RGB", size).save(blob, kind if kind.isupper() else "PPM")
    if kind == "bytes":
        monkeypatch.setattr(sources, "_MOST_BYTES", 1000)
    for part in ("train", "test"):
        file = tmp_path / "images" / part / "cat" / "1.png"
        file.parent.mkdir(parents=True)
        file.write_bytes(blob.getvalue())
    source = sources.find_source(f"folder:{tmp_path}/images", tmp_path, None, None)
    if kind in ("PNG", "JPEG", "TIFF"):
        assert source.read(lambda line: None)[0].images.shape == (1, 32, 32, 3)
    else:
        with pytest.raises(UsageError, match=r"not a readable image|larger than"):
            source.read(lambda line: None)
