"""A checkpoint on disk: what is not whole is refused with its reason; no code in it is run."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from jobkit.paths import RunPaths
from jobkit.payload import checkpoint
from jobkit.payload.batches import Progress
from jobkit.payload.checkpoint import Checkpoints, Corrupt, read_index
from jobkit.spec.runspec import RunSpec

TENSORS = {"w": torch.rand(30, 40), "b": torch.ones(2, dtype=torch.bfloat16)}
DATA, MANIFEST = "__0_0.distcp", "manifest.json"


def write(group: Any, folder: Path, checksums: bool = False) -> Path:
    # As one of before its classes were written.
    manifest, report = {"progress": vars(Progress()), "layout": {}, "spec": {}}, cast("Any", None)
    spec = RunSpec(checkpoint_checksums=checksums)
    writer = Checkpoints(RunPaths(folder.parent), 0, group, report, spec)
    writer._write(folder.with_name(".tmp"), folder, TENSORS, manifest)
    return folder


@pytest.fixture(scope="module")
def written(alone: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, of which the file of tensors has a checksum."""
    return write(alone, tmp_path_factory.mktemp("written") / "00000008-0", checksums=True)


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


class Hostile:
    """Unpickled by the book, it makes a folder."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("was-here",)


def read(group: dist.ProcessGroup | None, folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.check(folder, group)
    tensors = found.blank("")
    found.read(tensors, group)
    return tensors


def test_it_is_read_as_it_was_written_its_index_once(alone, written, tmp_path, monkeypatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(
        checkpoint, "read_index", lambda path: calls.append(path) or read_index(path)
    )
    monkeypatch.setattr(dcp.FileSystemReader, "read_metadata", lambda *_: pytest.fail("again"))
    plain = write(alone, tmp_path / "1-0")
    for reader, folder, fields in (
        (alone, written, {"bytes", "sha256"}),
        (None, plain, {"bytes"}),  # without a group: one process, as for an export
    ):
        found = read(reader, folder)
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[name], t) for name, t in TENSORS.items())
        files = json.loads((folder / MANIFEST).read_text())["files"]
        assert [set(files[name]) for name in (".metadata", DATA)] == [fields] * 2
    assert len(calls) == 2


def vouched(folder: Path, name: str, content: bytes) -> None:
    """Exchange a file, and have the manifest vouch for it, as whoever made it could."""
    (folder / name).write_bytes(content)
    changed(folder, lambda manifest: manifest["files"].update({name: {"bytes": len(content)}}))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def cut_to(folder: Path, name: str, size: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:size])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / DATA).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / DATA).write_bytes(content)


def a_device(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).symlink_to("/dev/null")
    changed(folder, lambda manifest: manifest["files"][DATA].update(bytes=0))


def hostile_tensors(folder: Path) -> None:
    torch.save(Hostile(), folder / "evil")
    content = (folder / "evil").read_bytes()
    # As long as before, for the reader takes each tensor from its own place in the file.
    size = (folder / DATA).stat().st_size
    vouched(folder, DATA, (content * (size // len(content) + 1))[:size])


LACKS = "manifest.json is absent, truncated or lacks fields"
SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda f: cut_to(f, DATA, 100), f"{DATA} has 100 bytes, not "),
    "one bit": (flip_a_bit, f"{DATA} has another checksum than when it was written"),
    "no tensors": (lambda f: (f / DATA).unlink(), f"{DATA}: No such file or directory"),
    "a device": (a_device, f"{DATA}: not a regular file"),  # as /dev/zero, which never ends
    "torn manifest": (lambda f: cut_to(f, MANIFEST, 200), LACKS),
    "another folder": (
        lambda f: changed(f, lambda m: m["files"].update({"../../x": {"bytes": 1}})), LACKS,
    ),
    "no files": (lambda f: changed(f, lambda m: m["files"].clear()), "which is not in manifest"),
    "negative": (lambda f: changed(f, lambda m: m["progress"].update(position=-3)), LACKS),
    "hostile index": (
        lambda f: vouched(f, ".metadata", pickle.dumps([Hostile()])),
        "its index cannot be read: posix.mkdir is not allowed in this file",
    ),
    "other index": (
        lambda f: vouched(f, ".metadata", pickle.dumps({"no": "index"})),
        "its index cannot be read: .* no attribute 'state_dict_metadata'",
    ),
    "hostile tensors": (hostile_tensors, "."),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILS)
def test_what_is_not_whole_is_refused_and_not_run(alone, copy, monkeypatch, name) -> None:
    monkeypatch.chdir(copy.parent)
    spoil, reason = SPOILS[name]
    spoil(copy)
    with pytest.raises(Corrupt, match=reason):
        read(alone, copy)
    assert not Path("was-here").exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert Path("was-here").exists()  # elsewhere it would run


def test_an_index_may_have_any_size(tmp_path: Path) -> None:
    """500 ranks of FSDP with some 300 parameters under AdamW have half a million chunks."""
    one, count = torch.Size([1]), 500_000
    chunks = [metadata.ChunkStorageMetadata(torch.Size([i]), one) for i in range(count)]
    entry = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([count]), chunks)
    index = metadata.Metadata({"w": entry}, bytes(65 << 20), {}, metadata.StorageMeta())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    assert read_index(tmp_path).state_dict_metadata["w"].chunks[-1] == chunks[-1]
