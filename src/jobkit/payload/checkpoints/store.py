"""Checkpoints on disk: torch.distributed.checkpoint's files and a manifest of their sizes.

    checkpoints/00000120-1/     iteration 120, written by attempt 1
        manifest.json           progress, layout, settings; size of every other file
        .metadata, *.distcp     torch.distributed.checkpoint's own

A folder is written under a temporary name and renamed when all of it is on the disk: one with the
final name is complete. What a file system has cut shows in the sizes, a changed byte in the SHA-256
that --checkpoint-checksums adds to them.
"""

import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from jobkit.files import open_regular
from jobkit.paths import RunPaths, write_json
from jobkit.payload.checkpoints.manifest import (
    MANIFEST,
    VERSION,
    Corrupt,
    Manifest,
    check_file,
    entries,
    read_manifest,
)
from jobkit.payload.distributed import all_or_raise
from jobkit.payload.progress import Progress

T = TypeVar("T")
Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # of tensors, by name
_METADATA = "torch.distributed.checkpoint.metadata"
# The classes in torch.distributed.checkpoint's own index, which is a pickle.
_INDEX = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *((_METADATA, name) for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )),
        *(("torch", name) for name in (
            "float64", "float32", "float16", "bfloat16", "uint8", "int8", "int16", "int32",
            "int64", "bool",
        )),
        *((module, name) for module in ("pathlib", "pathlib._local")
          for name in ("PosixPath", "PurePosixPath", "Path")),
    }
)  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch.distributed.checkpoint's index: nothing else than its own classes is made."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _INDEX:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in this file")
        return super().find_class(module, name)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk."""

    folder: Path
    iteration: int
    bytes: int
    time_s: float


class Unsaved(Exception):
    """A checkpoint could not be written, and nothing of it is left; the text says why."""


class Store:
    """Writes and reads the checkpoints of a job. Every rank calls; group: of the CPU, its own."""

    def __init__(self, rank: int, group: dist.ProcessGroup, checksums: bool = False) -> None:
        self.rank, self.group, self.checksums = rank, group, checksums
        self.ranks = dist.get_world_size(group)

    def everyone(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def write(
        self,
        folder: Path,
        tensors: dict[str, Tensor],
        progress: Progress,
        layout: dict[str, Any],
        spec: dict[str, Any],
        allowed: Callable[[], None],
    ) -> Saved:
        """Write a checkpoint; allowed is called right before the final rename, and may raise.

        Raises Unsaved, on every rank, if one of them could not write.
        """
        started, beside = time.monotonic(), _beside(folder)
        import torch.distributed.checkpoint as dcp  # a slow import that few runs need
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            self._each(lambda: self._make_room(beside))
            writer = _writer(beside, tensors.values())
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
            files = self._each(lambda: entries(beside, self.rank, self.checksums))
            manifest: dict[str, Any] = {
                "v": VERSION,
                "progress": asdict(progress),
                "layout": layout,
                "spec": spec,
                "torch": torch.__version__,
                "files": {name: entry for part in files for name, entry in part.items()},
            }
            self._each(lambda: self._publish(beside, folder, manifest, allowed))
        except (Exception, CheckpointException) as error:
            if self.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
            raise Unsaved(_root_cause(error)) from error
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        return Saved(folder, progress.iteration, size, time.monotonic() - started)

    def _make_room(self, beside: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)

    def _publish(
        self, beside: Path, folder: Path, manifest: dict[str, Any], allowed: Callable[[], None]
    ) -> None:
        if self.rank == 0:
            write_json(beside / MANIFEST, manifest)
            allowed()
            beside.rename(folder)
            _sync_folder(folder.parent)

    def _each(self, act: Callable[[], T]) -> list[T]:
        """Every rank's result of act; where it fails on one rank, raise on all of them."""
        prefix = f"rank {self.rank}: " if self.ranks > 1 else ""
        return all_or_raise(self.everyone, act, Exception, lambda e: prefix + _root_cause(e))

    def check(self, folder: Path) -> tuple[Manifest, Any]:
        """Manifest and index of a checkpoint whose files match them; Corrupt on every rank."""
        found: list[tuple[Manifest, Any]] = []  # no result of act: each rank keeps its own copy

        def act() -> None:
            manifest = read_manifest(folder)
            for name in sorted(manifest.files)[self.rank :: self.ranks]:
                check_file(folder / name, manifest.files[name])
            index = read_index(folder)
            _check_index(index, manifest)
            found.append((manifest, index))

        all_or_raise(self.everyone, act, Corrupt)
        return found[0]

    def read(self, folder: Path, index: Any, tensors: dict[str, Tensor]) -> None:
        """Fill the tensors, in place, from a checkpoint; a sharded one gets its shard.

        index: as check() gave it. Raises Corrupt, on every rank, if a tensor is absent or has
        another shape.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            dcp.load(tensors, storage_reader=_reader(folder, index), process_group=self.group)
        except (Exception, CheckpointException) as error:
            raise Corrupt(_root_cause(error)) from error


def _writer(folder: Path, tensors: Iterable[Tensor]) -> Any:
    """torch's writer of a checkpoint's files, but an error is the operating system's own."""
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().write_data(*args, **kwargs)
            except Exception as error:
                # On a full disk the archive's own error hides the system's, and only the
                # outermost error reaches the other ranks.
                inner: BaseException | None = error
                while inner and not isinstance(inner, OSError):
                    inner = inner.__context__
                raise inner or error from None

    # For tensors on the CPU torch would synchronise a stream all the same, and open a context for
    # that on the thread's current GPU.
    copied = all(tensor.device.type == "cpu" for tensor in tensors)
    ahead: dict[str, Any] = {"per_thread_copy_ahead": 0} if copied else {}
    return Writer(folder, sync_files=True, **ahead)


def _reader(folder: Path, index: Any) -> Any:
    """torch's reader of a checkpoint's files, with an index that has been read."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            index.storage_meta.load_id = self.load_id
            return index

    return Reader(folder)


def read_index(folder: Path) -> Any:
    """torch's index of a checkpoint, of any size; raises Corrupt. Unpickling it runs no code."""
    try:
        with open_regular(folder / ".metadata") as file:
            index = _IndexUnpickler(file).load()
        # Both are asked for here: what is no index lacks them.
        _ = index.state_dict_metadata, index.storage_meta.load_id
    except Exception as error:  # an invalid pickle fails in many ways
        raise Corrupt(f"its index cannot be read: {_root_cause(error)}") from None
    return index


def shapes_in(index: Any) -> Shapes:
    """The shape and type of every tensor in a checkpoint, by name."""
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
    }


def name_of(iteration: int, attempt: int) -> str:
    """The name of a checkpoint's folder."""
    return f"{iteration:08d}-{attempt}"


def found_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first: the last attempt's before all others.

    A later attempt resumed from an earlier one's, maybe an older one, or from scratch.
    """
    named = []
    for path in folder.glob("*-*"):
        iteration, _, attempt = path.name.partition("-")
        if path.is_dir() and iteration.isdecimal() and attempt.isdecimal():
            named.append(((int(attempt), int(iteration)), path))
    return [path for _, path in sorted(named, reverse=True)]


def attempt_of(folder: Path) -> int:
    """Which attempt of its run wrote a checkpoint."""
    return int(folder.name.partition("-")[2])


def clear_unfinished(paths: RunPaths) -> None:
    """Remove the partial checkpoints of an attempt that was interrupted while writing."""
    for path in paths.checkpoints.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def _check_index(index: Any, manifest: Manifest) -> None:
    """Raise Corrupt if the index names a file that is not in the manifest."""
    try:
        used = {info.relative_path for info in index.storage_data.values()}
    except (AttributeError, TypeError):
        raise Corrupt("its index lacks required fields") from None
    if strange := sorted(used - manifest.files.keys()):
        raise Corrupt(f"its index names {strange[0]!r}, which is not in {MANIFEST}")


def _sync_folder(folder: Path) -> None:
    """Flush a rename in the folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _root_cause(error: BaseException) -> str:
    """One line for an error; of those that torch gathers from the ranks, the first."""
    gathered = getattr(error, "failures", None)
    if gathered:
        rank, wrapped = next(iter(gathered.items()))
        inner = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {_root_cause(inner)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def prune(paths: RunPaths, attempt: int, keep: int) -> None:
    """Remove all but the newest checkpoints of this and earlier attempts."""
    own = [folder for folder in found_in(paths.checkpoints) if attempt_of(folder) <= attempt]
    for folder in own[keep:]:
        # Renamed first: a partly removed checkpoint must not look complete.
        beside = _beside(folder)
        folder.rename(beside)
        shutil.rmtree(beside, ignore_errors=True)
