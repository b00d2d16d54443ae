"""Caches and checkpoints that somebody else made: used as what was checked, or refused."""

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobkit.errors import UsageError
from support.hostile import in_child

torch = pytest.importorskip("torch")

from jobkit.payload.checkpoints.manifest import Corrupt, check_file, read_manifest  # noqa: E402
from jobkit.payload.checkpoints.store import Store, _check_index  # noqa: E402
from jobkit.payload.data import cache as caches  # noqa: E402
from jobkit.payload.data.sources import find_source  # noqa: E402

FILES = ("train_images", "train_labels", "test_images", "test_labels")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A forked child has none of its parent's threads, and would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(data_dir: Path) -> Path:
    """A cache of 20 + 20 images of 10 classes."""
    return caches.ensure_cache(find_source("synthetic", data_dir, 20, 20), data_dir, lambda _: None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make(tmp_path)


def edited(cache: Path, **changes: Any) -> None:
    """Change keys of the manifest."""
    path = cache / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def resealed(cache: Path, name: str, content: bytes) -> None:
    """Replace a file, with its checksum."""
    (cache / name).write_bytes(content)
    sums = json.loads((cache / "manifest.json").read_text())["sha256"]
    edited(cache, sha256={**sums, name: hashlib.sha256(content).hexdigest()})


def labels(*values: int) -> bytes:
    return bytes(torch.tensor(values, dtype=torch.int64).numpy().tobytes())


SHA = "0" * 64
MANIFESTS: list[dict[str, Any]] = [
    {"sha256": {}}, {"sha256": {"train_images": SHA}}, {"sha256": None},
    {"sha256": {"/dev/zero": SHA}},
    {"sha256": dict.fromkeys(("../x", *FILES), SHA)}, {"sha256": dict.fromkeys(FILES, None)},
    {"counts": {"train": 20}}, {"counts": {"train": -20, "test": 20}}, {"counts": None},
    {"counts": {"train": True, "test": 20}}, {"counts": {"train": 2**70, "test": 20}},
    {"counts": {"train": 20.0, "test": 20}}, {"counts": {"train": "20", "test": 20}},
    {"classes": None}, {"classes": []}, {"classes": [1] * 10}, {"classes": "abcdefghij"},
    {"classes": ["x"] * 200_000}, {"classes": ["x"]}, {"v": 2},
]  # fmt: skip


@pytest.mark.parametrize("changes", MANIFESTS, ids=lambda c: json.dumps(c)[:60])
def test_a_manifest_that_is_none_is_found_at_fault(cache: Path, changes: dict[str, Any]) -> None:
    edited(cache, **changes)
    assert caches.find_fault(cache)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"[[]," * 900_000, b"null", b"[]", b"\xff", b""]
)
def test_a_manifest_that_is_no_object_is_found_at_fault(cache: Path, content: bytes) -> None:
    (cache / "manifest.json").write_bytes(content)
    done = in_child(lambda: caches.find_fault(cache))
    assert done.faults == [] and done.code
    with pytest.raises(UsageError):
        caches.open_cache(cache)


@pytest.mark.parametrize(
    "values", [(10**9, *[0] * 19), (-1, *[0] * 19), (10, *[0] * 19), (0,) * 19, (0,) * 21, ()]
)
def test_labels_that_are_no_classes_are_found_though_the_checksum_is_right(
    cache: Path, values: tuple[int, ...]
) -> None:
    resealed(cache, "train_labels", labels(*values))
    assert caches.find_fault(cache)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_is_an_error_of_one_line(cache: Path, name: str) -> None:
    """As opened later, by a rank whose node has checked it before: no signal ends it."""
    os.truncate(cache / name, 8)
    done = in_child(lambda: str(caches.open_cache(cache)))
    assert "UsageError" in done.error and done.error.strip().count("\n") > 0
    with pytest.raises(UsageError, match="another size"):
        caches.open_cache(cache)


def test_a_strangers_cache_is_named_and_copied(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "stranger", lambda folder: 65534)
    said: list[str] = []
    caches.ensure_cache(find_source("synthetic", tmp_path, 20, 20), tmp_path, said.append)
    assert "made by user id 65534" in said[-1]
    data = caches.open_cache(cache)
    before = data.train.images.clone()
    for name in FILES:
        os.truncate(cache / name, 0)  # of files that are mapped this would end the process
    assert torch.equal(data.train.images, before)


def test_labels_of_a_stranger_are_looked_at_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have changed since the check."""
    monkeypatch.setattr(caches, "stranger", lambda folder: 65534)
    (cache / "test_labels").write_bytes(labels(*[10**9] * 20))
    with pytest.raises(UsageError, match="no class"):
        caches.open_cache(cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_who_is_a_stranger(cache: Path, tmp_path: Path) -> None:
    assert caches.stranger(cache) is None
    os.chown(cache, 65534, 65534)
    assert caches.stranger(cache) == 65534
    os.chown(tmp_path, 65534, 65534)  # whose folder was chosen is trusted
    assert caches.stranger(cache) is None


def test_a_link_in_the_place_of_a_cache_is_not_removed_through(cache: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("x")
    cache.rename(cache.with_name("was"))
    cache.symlink_to(home)
    with pytest.raises(UsageError):
        make(tmp_path)
    assert (home / "precious").read_text() == "x"


def spoilt(folder: Path, rng: random.Random) -> None:
    """Change files of a folder in one of many ways."""
    for _ in range(rng.randint(1, 3)):
        files = sorted(p for p in folder.iterdir() if not p.is_dir())
        path = rng.choice(files) if files else folder / "x"
        content = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        ways: list[Callable[[], object]] = [
            lambda path=path: path.unlink(),
            lambda path=path, c=content: path.write_bytes(bytes(c[: rng.randrange(len(c) + 1)])),
            lambda path=path: path.write_bytes(rng.randbytes(rng.randrange(99))),
            lambda path=path, c=content: path.write_bytes(flipped(c, rng)),
            lambda path=path, c=content: path.write_bytes(numbers(bytes(c), rng)),
            lambda path=path: (path.unlink(), path.symlink_to("/dev/zero")),
            lambda path=path: (path.unlink(), os.mkfifo(path)),
            lambda path=path: (path.unlink(), path.mkdir()),
            lambda path=path: os.truncate(path, 1 << 40),
        ]
        with contextlib.suppress(OSError):
            rng.choice(ways)()


def flipped(content: bytearray, rng: random.Random) -> bytes:
    """Content with a few other bytes."""
    for _ in range(min(len(content), rng.randint(1, 9))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def numbers(content: bytes, rng: random.Random) -> bytes:
    """Content with a number of it exchanged."""
    hostile = [
        b"-1",
        b"Infinity",
        b"1e999",
        b"NaN",
        b"9" * 400,
        b"null",
        b"[[]]",
        b'"../x"',
        b"2.5",
    ]
    words = [w for w in (b"20", b"10", b"1", b"2", b"3", b"64") if w in content]
    return content.replace(rng.choice(words), rng.choice(hostile), 1) if words else content


def look_at_cache(folder: Path) -> str:
    """Check a cache, and open it as another rank would."""
    fault = caches.find_fault(folder)
    try:
        caches.open_cache(folder, 5, 5)
    except UsageError as error:
        return str(error)
    return fault


def look_at_checkpoint(folder: Path) -> str:
    """What a rank does with a checkpoint before it takes tensors from it."""
    try:
        manifest = read_manifest(folder)
        for name, entry in manifest.files.items():
            check_file(folder / name, entry)
        _check_index(folder, manifest)
        Store.shapes(None, folder)  # type: ignore[arg-type]
    except Corrupt as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a run leaves it, made by one process."""
    import torch.distributed.checkpoint as dcp

    from jobkit.paths import write_json
    from jobkit.payload.checkpoints.manifest import MANIFEST, VERSION, digests
    from jobkit.payload.progress import Progress

    folder = tmp_path_factory.mktemp("whole") / "00000002-0"
    dcp.save({"model.w": torch.zeros(3, 4)}, checkpoint_id=folder, no_dist=True)
    files = digests(folder, 0)
    content = {"v": VERSION, "progress": vars(Progress()), "layout": {}, "spec": {}, "files": files}
    write_json(folder / MANIFEST, content)
    assert look_at_checkpoint(folder) == ""
    return folder


LOOKS = {"cache": look_at_cache, "checkpoint": look_at_checkpoint}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(LOOKS)))
def test_any_change_is_a_fault_or_harmless(
    seed: int, kind: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import shutil

    root = tmp_path_factory.mktemp("spoilt")
    folder = make(root) if kind == "cache" else root / checkpoint.name
    if kind == "checkpoint":
        shutil.copytree(checkpoint, folder)
    spoilt(folder, random.Random(seed))
    done = in_child(lambda: LOOKS[kind](folder))
    assert done.faults == []


@pytest.mark.parametrize("value", ["Infinity", "1e999", "NaN", "9" * 5000, "[1]", "null", "-1"])
def test_a_progress_that_is_no_number_is_a_corrupt_manifest(
    checkpoint: Path, value: str, tmp_path: Path
) -> None:
    text = (checkpoint / "manifest.json").read_text()
    changed = text.replace('"iteration": 0', f'"iteration": {value}')
    assert changed != text
    (tmp_path / "manifest.json").write_text(changed)
    with pytest.raises(Corrupt):
        read_manifest(tmp_path)


def test_an_index_with_unhashable_paths_is_corrupt(checkpoint: Path, monkeypatch: Any) -> None:
    from types import SimpleNamespace

    from jobkit.payload.checkpoints import store

    info = SimpleNamespace(relative_path=["x"])
    metadata = SimpleNamespace(storage_data={0: info})
    reader = SimpleNamespace(read_metadata=lambda: metadata)
    monkeypatch.setattr(store, "_reader", lambda folder: reader)
    with pytest.raises(Corrupt):
        _check_index(checkpoint, read_manifest(checkpoint))
