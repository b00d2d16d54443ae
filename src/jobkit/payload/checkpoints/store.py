"""Checkpoints on disk: torch.distributed.checkpoint's files and a manifest that vouches for them.

    checkpoints/00000120-1/     iteration 120, written by attempt 1
        manifest.json           progress, layout, settings; size and SHA-256 of every other file
        .metadata, *.distcp     torch.distributed.checkpoint's own

A folder is written beside its place and renamed when all of it is on the disk, so that one with
that name is whole or was broken later, which its manifest shows.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jobkit.files import open_regular
from jobkit.paths import RunPaths, write_json
from jobkit.payload.checkpoints.manifest import (
    MANIFEST,
    VERSION,
    Broken,
    Manifest,
    check_file,
    digests,
    read_manifest,
)
from jobkit.payload.progress import Progress
from jobkit.payload.unpickle import restricted_load

Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # of tensors, by name
_METADATA = "torch.distributed.checkpoint.metadata"
# What torch.distributed.checkpoint's own index, a pickle, is made of.
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


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk."""

    folder: Path
    iteration: int
    bytes: int
    time_s: float


class Unsaved(Exception):
    """A checkpoint could not be written; nothing of it is left. The text says why."""


class Store:
    """Writes and reads the checkpoints of a job. Every rank calls; group: of the CPU, its own."""

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self.rank, self.group = rank, group
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
        """Write a checkpoint; allowed is asked right before it is put in its place, and may raise.

        Raises Unsaved, on every rank, where one of them could not write.
        """
        started, beside = time.monotonic(), _beside(folder)
        import torch.distributed.checkpoint as dcp  # takes its time, and few runs need it
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            self._each(lambda: self._make_room(beside))
            dcp.save(tensors, storage_writer=_writer(beside), process_group=self.group)
            files = self._each(lambda: digests(beside, self.rank))
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

    def _each(self, act: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; where one fails, raise on all, that none waits for it."""
        result, fault = None, None
        try:
            result = act()
        except Exception as error:
            fault = _root_cause(error)
        answers = self.everyone((result, fault))
        for rank, (_, other) in enumerate(answers):
            if other:
                raise RuntimeError(f"rank {rank}: {other}" if self.ranks > 1 else other)
        return [answer for answer, _ in answers]

    def check(self, folder: Path) -> Manifest:
        """The manifest of a checkpoint whose files are as it says; raises Broken on every rank."""
        manifest, fault = None, ""
        try:
            manifest = read_manifest(folder)
            for name in sorted(manifest.files)[self.rank :: self.ranks]:
                check_file(folder / name, manifest.files[name])
            _check_index(folder, manifest)
        except Broken as error:
            fault = str(error)
        fault = next(filter(None, self.everyone(fault)), "")
        if fault or manifest is None:
            raise Broken(fault)
        return manifest

    def shapes(self, folder: Path) -> Shapes:
        """The shape and type of every tensor in a checkpoint, by name. Raises Broken."""
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in _reader(folder).read_metadata().state_dict_metadata.items()
        }

    def read(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Fill the tensors, in place, from a checkpoint; sharded ones get their part of it.

        Raises Broken, on every rank, where one of them is absent or of another shape.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            dcp.load(tensors, storage_reader=_reader(folder), process_group=self.group)
        except (Exception, CheckpointException) as error:
            raise Broken(_root_cause(error)) from error


def _writer(folder: Path) -> Any:
    """torch's writer of a checkpoint's files, which says what the system said where one fails."""
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().write_data(*args, **kwargs)
            except Exception as error:
                # A full disk has the archive's own complaint on top. Only the outermost error
                # comes to the other ranks.
                inner: BaseException | None = error
                while inner and not isinstance(inner, OSError):
                    inner = inner.__context__
                raise inner or error from None

    return Writer(folder, sync_files=True)


def _reader(folder: Path) -> Any:
    """torch's reader of a checkpoint's files, but for its index: nothing in that may run."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            try:
                with open_regular(folder / ".metadata") as file:
                    metadata = restricted_load(file, _INDEX)
                metadata.storage_meta.load_id = self.load_id
            except Exception as error:  # what is no pickle fails in many ways
                raise Broken(f"its index cannot be read: {_root_cause(error)}") from None
            return metadata

    return Reader(folder)


def name_of(iteration: int, attempt: int) -> str:
    """The name of a checkpoint's folder."""
    return f"{iteration:08d}-{attempt}"


def found_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first: the last attempt's before all others.

    A later attempt went on from an earlier one's, maybe an older one, or began anew.
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
    """Remove what an attempt left that was ended while it wrote."""
    for path in paths.checkpoints.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def _check_index(folder: Path, manifest: Manifest) -> None:
    """Raise Broken where the index names a file that the manifest does not vouch for."""
    try:
        used = {
            info.relative_path for info in _reader(folder).read_metadata().storage_data.values()
        }
    except AttributeError:
        raise Broken("its index lacks what an index has") from None
    if strange := sorted(used - manifest.files.keys()):
        raise Broken(f"its index names {strange[0]!r}, which is not in {MANIFEST}")


def _sync_folder(folder: Path) -> None:
    """Have a rename in the folder on the disk."""
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
    """Remove this and earlier attempts' checkpoints but for the newest ones."""
    own = [folder for folder in found_in(paths.checkpoints) if attempt_of(folder) <= attempt]
    for folder in own[keep:]:
        # Renamed first: half of a checkpoint must not look like one.
        beside = _beside(folder)
        folder.rename(beside)
        shutil.rmtree(beside, ignore_errors=True)
