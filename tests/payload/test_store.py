"""A checkpoint on disk: what is not whole is refused with its reason; no code in it is run."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from jobkit.payload.checkpoints import store
from jobkit.payload.checkpoints.copies import Copier, once
from jobkit.payload.checkpoints.manifest import Corrupt
from jobkit.payload.checkpoints.store import Store, Unsaved, read_index, shapes_in
from jobkit.payload.progress import Progress

TENSORS = {"w": torch.rand(30, 40), "b": torch.ones(2, dtype=torch.bfloat16)}
DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def written(group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, of which the file of tensors has a checksum."""
    folder = tmp_path_factory.mktemp("written") / "00000008-0"
    Store(0, group, checksums=True).write(folder, TENSORS, Progress(), {}, {}, lambda: None)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


class Hostile:
    """Unpickled by the book, it makes a folder."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("was-here",)


def read(group: dist.ProcessGroup, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    _, index = Store(0, group).check(folder)
    found = {name: torch.zeros(size, dtype=d) for name, (size, d) in shapes_in(index).items()}
    Store(0, group).read(folder, index, found)
    return found


def test_it_is_read_as_it_was_written_and_its_index_once(
    group: dist.ProcessGroup, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(store, "read_index", lambda path: calls.append(path) or read_index(path))
    found = read(group, written)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], t) for name, t in TENSORS.items())
    assert len(calls) == 1


def test_checksums_are_an_option(group: dist.ProcessGroup, written: Path, tmp_path: Path) -> None:
    Store(0, group).write(tmp_path / "1-0", TENSORS, Progress(), {}, {}, lambda: None)
    for folder, fields in ((tmp_path / "1-0", {"bytes"}), (written, {"bytes", "sha256"})):
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert set(files) == {".metadata", DATA}
        assert [set(entry) for entry in files.values()] == [fields] * 2


def vouched(folder: Path, name: str, content: bytes) -> None:
    """Exchange a file, and have the manifest vouch for it, as whoever made it could."""
    (folder / name).write_bytes(content)
    changed(folder, lambda manifest: manifest["files"].update({name: {"bytes": len(content)}}))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def numbered(folder: Path, value: str) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"iteration": 0', f'"iteration": {value}'))
    assert value in path.read_text()


def cut_to(folder: Path, name: str, size: int) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:size])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / DATA).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / DATA).write_bytes(content)


def hostile_tensors(folder: Path) -> None:
    torch.save(Hostile(), folder / "evil")
    content = (folder / "evil").read_bytes()
    # As long as before, for the reader takes each tensor from its own place in the file.
    size = (folder / DATA).stat().st_size
    vouched(folder, DATA, (content * (size // len(content) + 1))[:size])


MANIFEST = "manifest.json"
LACKS = "manifest.json lacks required fields"
SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda f: cut_to(f, DATA, 100), f"{DATA} has 100 bytes, not "),
    "one bit": (flip_a_bit, f"{DATA} has another checksum than when it was written"),
    "no tensors": (lambda f: (f / DATA).unlink(), f"{DATA}: No such file or directory"),
    "torn manifest": (lambda f: cut_to(f, MANIFEST, 200), "manifest.json is absent or truncated"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is absent or truncated"),
    "version": (lambda f: changed(f, lambda m: m.update(v=9)), "manifest.json has version 9, not"),
    "another folder": (
        lambda f: changed(f, lambda m: m["files"].update({"../../x": {"bytes": 1}})), LACKS,
    ),
    "no files": (lambda f: changed(f, lambda m: m["files"].clear()), "which is not in manifest"),
    "no epoch": (lambda f: changed(f, lambda m: m["progress"].pop("epoch")), LACKS),
    "negative": (lambda f: changed(f, lambda m: m["progress"].update(position=-3)), LACKS),
    **{
        f"iteration {value}": (lambda f, value=value: numbered(f, value), "manifest.json ")
        for value in ("Infinity", "1e999", "NaN", "9" * 5000, "[1]", "null")
    },
    "hostile index": (
        lambda f: vouched(f, ".metadata", pickle.dumps([Hostile()])),
        "its index cannot be read: posix.mkdir is not allowed in this file",
    ),
    "other index": (
        lambda f: vouched(f, ".metadata", pickle.dumps({"no": "index"})),
        "its index cannot be read: .* no attribute 'state_dict_metadata'",
    ),
    "empty index": (lambda f: vouched(f, ".metadata", b""), "its index cannot be read: Ran out"),
    "hostile tensors": (hostile_tensors, "."),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILS)
def test_what_is_not_whole_is_refused_and_not_run(
    group: dist.ProcessGroup, copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(copy.parent)
    spoil, reason = SPOILS[name]
    spoil(copy)
    with pytest.raises(Corrupt, match=reason):
        read(group, copy)
    assert not Path("was-here").exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert Path("was-here").exists()  # elsewhere it would run


def test_what_cannot_be_written_leaves_nothing(group: dist.ProcessGroup, tmp_path: Path) -> None:
    def fenced() -> None:
        raise RuntimeError("attempt 1 has begun")

    with pytest.raises(Unsaved, match="attempt 1 has begun"):
        Store(0, group).write(tmp_path / "1-0", TENSORS, Progress(), {}, {}, fenced)
    assert list(tmp_path.iterdir()) == []


def index_of(ranks: int, tensors: int) -> Metadata:
    """The index of a checkpoint of FSDP: each rank has a chunk of each tensor."""
    entries, places = {}, {}
    rows = [torch.Size([row, 0]) for row in range(ranks)]
    for name in (f"optim.layer{i}.exp_avg" for i in range(tensors)):
        chunks = [ChunkStorageMetadata(row, torch.Size([1, 4])) for row in rows]
        entries[name] = TensorStorageMetadata(TensorProperties(), torch.Size([ranks, 4]), chunks)
        for rank, row in enumerate(rows):
            places[MetadataIndex(name, row, rank)] = _StorageInfo(f"__{rank}_0.distcp", 16, 16)
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta())


@pytest.mark.parametrize(
    ("ranks", "tensors", "padding"),
    [(4, 10, 65 << 20), pytest.param(500, 1000, 0, marks=pytest.mark.long)],
)
def test_an_index_may_have_any_size(tmp_path: Path, ranks: int, tensors: int, padding: int) -> None:
    """500 ranks of FSDP with some 300 parameters under AdamW have half a million chunks."""
    index = index_of(ranks, tensors)
    index.planner_data = bytes(padding)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    found = read_index(tmp_path)
    assert found.storage_data == index.storage_data
    assert shapes_in(found) == dict.fromkeys(
        index.state_dict_metadata, (torch.Size([ranks, 4]), torch.float32)
    )


def test_an_index_of_torchs_own_is_read(tmp_path: Path) -> None:
    dcp.save(TENSORS, checkpoint_id=tmp_path, no_dist=True)
    found = shapes_in(read_index(tmp_path))
    assert found == {name: (t.shape, t.dtype) for name, t in TENSORS.items()}


GPU = torch.device("cuda", 0)


def state(value: float) -> dict[str, Tensor]:
    return {"model.w": torch.full((3, 4), value), "model.b": torch.full((4,), -value)}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors of the CPU are taken for those of a GPU; each wait for the GPU is noted."""
    found: list[str] = []
    monkeypatch.setattr(Copier, "_staged", lambda self, _: self._device_type == "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: found.append("all"))
    return found


def test_all_copies_are_waited_for_once_and_use_the_same_memory_again(waits: list[str]) -> None:
    copier, live = Copier(GPU), state(1.0)
    first = copier.copies(live)
    places = {name: t.data_ptr() for name, t in first.items()}
    assert waits == ["all"]
    for tensor in live.values():
        tensor.mul_(3)  # the training goes on
    assert all(torch.equal(first[name], t) for name, t in state(1.0).items())
    second = copier.copies(live)
    assert waits == ["all", "all"]
    assert all(torch.equal(second[name], t) for name, t in state(3.0).items())
    assert {name: t.data_ptr() for name, t in second.items()} == places


def test_where_no_memory_can_be_pinned_copies_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch, waits: list[str]
) -> None:
    def stage(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: part or all of the requested memory range is in use")

    monkeypatch.setattr(staging.DefaultStager, "stage", stage)
    copier, live = Copier(GPU), state(2.0)
    with pytest.warns(UserWarning, match="not pinned: CUDA error"):
        found = copier.copies(live)
    live["model.w"].zero_()
    assert torch.equal(found["model.w"], state(2.0)["model.w"])
    assert torch.equal(copier.copies(live)["model.w"], live["model.w"])  # without another try


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_on_the_cpu_copies_are_plain(device: torch.device | None) -> None:
    live = state(1.0)
    found = Copier(device).copies(live)
    assert all(torch.equal(found[name], t) for name, t in live.items())
    assert {t.data_ptr() for t in found.values()}.isdisjoint(t.data_ptr() for t in live.values())


def test_each_replicated_tensor_is_given_by_one_rank() -> None:
    """Three ranks: two with a replica each, as pipelines beside each other, and one without."""
    replica = {"a": torch.zeros(8), "b": torch.zeros(8), "c": torch.zeros(4)}
    held = [replica | {"rank.0.x": torch.zeros(1)}, replica | {"rank.1.x": torch.zeros(1)}]
    held += [{"d": torch.zeros(2), "rank.2.x": torch.zeros(1)}]
    sizes = [{n: t.numel() * t.element_size() for n, t in part.items()} for part in held]

    def everyone(own: dict[str, int]) -> list[dict[str, int]]:
        assert own in sizes
        return sizes

    given = [sorted(once(part, everyone, rank)) for rank, part in enumerate(held)]
    assert given == [["a", "c", "rank.0.x"], ["b", "rank.1.x"], ["d", "rank.2.x"]]
