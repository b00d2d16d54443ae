"""The index of a checkpoint: of any size, read once, made of torch's own classes alone."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from jobkit.payload.checkpoints.manifest import Corrupt
from jobkit.payload.checkpoints.store import Store, read_index, shapes_in
from jobkit.payload.progress import Progress


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


@pytest.fixture
def own_store() -> Iterator[Store]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Store(0, dist.group.WORLD)
    dist.destroy_process_group()


def test_it_is_read_once_for_a_resume(
    own_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"w": torch.rand(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    own_store.write(tmp_path / "1-0", tensors, Progress(), {}, {}, lambda: None)
    calls: list[Path] = []
    monkeypatch.setattr(store, "read_index", lambda path: calls.append(path) or read_index(path))
    manifest, index = own_store.check(tmp_path / "1-0")
    blank = {n: torch.zeros(size, dtype=d) for n, (size, d) in shapes_in(index).items()}
    own_store.read(tmp_path / "1-0", index, blank)
    assert all(torch.equal(blank[name], t) for name, t in tensors.items())
    assert set(manifest.files) == {".metadata", "__0_0.distcp"}
    assert len(calls) == 1


def test_torchs_own_is_read(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    found = shapes_in(read_index(tmp_path))
    assert found == {name: (t.shape, t.dtype) for name, t in tensors.items()}


class Hostile:
    """Unpickled by the book, it makes a folder."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (pickle.dumps([Hostile()]), "posix.mkdir is not allowed in this file"),
        (pickle.dumps({"no": "index"}), "no attribute 'state_dict_metadata'"),
        (b"no pickle", ""),
        (b"", "Ran out of input"),
    ],
)
def test_anything_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(Corrupt, match=f"its index cannot be read: .*{line}"):
        read_index(tmp_path)
    assert not (tmp_path / "was-here").exists()
    if line.startswith("posix"):  # read without the list of what is allowed, it would have run
        pickle.loads(content)
        assert (tmp_path / "was-here").exists()
