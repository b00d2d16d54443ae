"""Checkpoints on disk: torch.distributed.checkpoint's files and a manifest of their sizes.

    checkpoints/00000120-1/     iteration 120, written by attempt 1
        manifest.json           progress, layout, settings; size of every other file
        .metadata, *.distcp     torch.distributed.checkpoint's own

A folder is written under a temporary name and renamed when all of it is on the disk: one with the
final name is complete. What a file system has cut shows in the sizes, a changed byte in the SHA-256
that --checkpoint-checksums adds to them.

Tensors have the names of the bare model, so that any strategy reads what any other wrote:

    model.NAME               a parameter
    optim.NAME.KEY           what the optimizer keeps for it
    rank.R.KEY               rank R's own: buffers (buffer.NAME), the state of its random numbers,
                             its sum of losses in the epoch in progress, what its strategy keeps

Sharded tensors are DTensors, of which each rank has its part.
"""

import contextlib
import hashlib
import json
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from jobkit.files import open_regular
from jobkit.paths import RunPaths, write_json
from jobkit.payload.batches import Progress
from jobkit.payload.distributed import T, all_or_raise, gather
from jobkit.payload.report import Reporter
from jobkit.spec.runspec import RunSpec

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

MANIFEST = "manifest.json"
LOSS_SUM = "epoch.loss_sum"
BUFFER, STRATEGY = "buffer.", "strategy."
CPU_STATE, GPU_STATE = "random.cpu", "random.cuda"
# What may stand in torch.distributed.checkpoint's own index, which is a pickle, by module.
_INDEX = {
    "torch": "Size float64 float32 float16 bfloat16 uint8 int8 int16 int32 int64 bool",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "pathlib": "PosixPath PurePosixPath Path",
    "pathlib._local": "PosixPath PurePosixPath Path",
}
Group = dist.ProcessGroup | None  # of the ranks, on the CPU; None: one process alone


class Corrupt(Exception):
    """A checkpoint cannot be used; the text says what is wrong with it."""


# --- the folders of a run ----------------------------------------------------------------------


def attempt_of(folder: Path) -> int:
    """Which attempt of its run wrote a checkpoint."""
    return int(folder.name.partition("-")[2])


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


def prune(folder: Path, attempt: int, keep: int) -> None:
    """Remove all but the newest checkpoints of this and earlier attempts."""
    mine = [path for path in found_in(folder) if attempt_of(path) <= attempt]
    for path in mine[keep:]:
        # Renamed first: a partly removed checkpoint must not look complete.
        beside = path.with_name(f".{path.name}.tmp")
        path.rename(beside)
        shutil.rmtree(beside, ignore_errors=True)


# --- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be read: its manifest, and torch's index of it."""

    folder: Path
    progress: Progress
    layout: dict[str, Any]
    spec: dict[str, Any]
    classes: int  # of the model's outputs
    files: dict[str, dict[str, Any]]
    index: Any

    @cached_property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """The shape and type of every tensor, by name."""
        entries = self.index.state_dict_metadata.items()
        return {name: (entry.size, entry.properties.dtype) for name, entry in entries}

    @property
    def writers(self) -> list[int]:
        """The ranks that put tensors of their own into it."""
        names = [name.split(".") for name in self.shapes if name.endswith(LOSS_SUM)]
        ranks = {rank for kind, rank, *_ in names if kind == "rank"}
        return sorted(int(rank) for rank in ranks if rank.isdecimal())

    def blank(self, *prefixes: str) -> dict[str, Tensor]:
        """Empty tensors of its shapes, to be read, for the names that begin so."""
        return {
            name: torch.empty(size, dtype=dtype)
            for name, (size, dtype) in self.shapes.items()
            if name.startswith(prefixes)
        }

    def read(self, tensors: dict[str, Tensor], group: Group = None) -> None:
        """Fill the tensors, in place; a sharded one gets its shard.

        Raises Corrupt, on every rank, if a tensor is absent or has another shape.
        """
        import torch.distributed.checkpoint as dcp  # a slow import that few runs need
        from torch.distributed.checkpoint.api import CheckpointException

        index, alone = self.index, group is None

        class Reader(dcp.FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                index.storage_meta.load_id = self.load_id
                return index

        try:
            dcp.load(
                tensors, storage_reader=Reader(self.folder), process_group=group, no_dist=alone
            )
        except (Exception, CheckpointException) as error:
            raise Corrupt(_root_cause(error)) from error


def check(folder: Path, group: Group = None) -> Checkpoint:
    """A checkpoint whose files match its manifest; Corrupt, on every rank.

    Each rank reads the index, which is too large to be sent, and looks at its share of the files.
    """
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)

    def check_share() -> Checkpoint:
        found = _read_manifest(folder)
        for name in sorted(found.files)[rank::ranks]:
            _check_file(folder / name, found.files[name])
        used = {info.relative_path for info in found.index.storage_data.values()}
        if strange := sorted(used - found.files.keys()):
            raise Corrupt(f"its index names {strange[0]!r}, which is not in {MANIFEST}")
        return found

    return all_or_raise(check_share, Corrupt, group)


def _read_manifest(folder: Path) -> Checkpoint:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        progress = Progress(*(int(content["progress"][f.name]) for f in fields(Progress)))
        files = {str(k): {**v, "bytes": int(v["bytes"])} for k, v in content["files"].items()}
        # An older one does not say its classes, which an export needs and no training.
        inside, classes = all(Path(name).name == name for name in files), content.get("classes", 0)
        if not inside or min(vars(progress).values()) < 0 or not 0 <= int(classes) < 1 << 20:
            raise ValueError
        layout, spec = dict(content["layout"]), dict(content["spec"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Corrupt(f"{MANIFEST} is absent, truncated or lacks fields") from None
    return Checkpoint(folder, progress, layout, spec, int(classes), files, read_index(folder))


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    """Raise Corrupt if a file has another size than its manifest says, or another checksum."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise Corrupt(f"{path.name} has {size:,} bytes, not {entry['bytes']:,}")
        if "sha256" in entry and _sha256(path) != entry["sha256"]:
            raise Corrupt(f"{path.name} has another checksum than when it was written")
    except OSError as error:
        raise Corrupt(f"{path.name}: {error.strerror or error}") from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch.distributed.checkpoint's index: nothing else than its own classes is made."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX.get(module, "").split():
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in this file")
        return super().find_class(module, name)


def read_index(folder: Path) -> Any:
    """torch's index of a checkpoint, of any size; raises Corrupt. Unpickling it runs no code."""
    try:
        with (folder / ".metadata").open("rb") as file:
            index = _IndexUnpickler(file).load()
        # All are asked for here: what is no index lacks them.
        _ = index.state_dict_metadata, index.storage_meta.load_id, index.storage_data.values
    except Exception as error:  # an invalid pickle fails in many ways
        raise Corrupt(f"its index cannot be read: {_root_cause(error)}") from None
    return index


# --- writing -----------------------------------------------------------------------------------


def shared_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    """Parameters and optimizer state that this rank holds: the live tensors, not copies."""
    trainer.strategy.settle()
    parameters = trainer.strategy.named_parameters()
    tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, state in trainer.strategy.optimizer_state(trainer.optimizer).items():
        tensors |= {f"optim.{name}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return tensors


def own_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    """The tensors that differ between the ranks."""
    strategy, gpu = trainer.strategy, trainer.strategy.device
    return {
        **{f"{BUFFER}{name}": buffer for name, buffer in strategy.named_buffers().items()},
        **{f"{STRATEGY}{name}": tensor for name, tensor in strategy.own_state().items()},
        CPU_STATE: torch.get_rng_state(),
        **({GPU_STATE: torch.cuda.get_rng_state(gpu)} if gpu.type == "cuda" else {}),
        LOSS_SUM: trainer.loss_sum,
    }


class Checkpoints:
    """Writes a run's checkpoints, keeps the newest, and reports each. Every rank has one."""

    def __init__(
        self,
        paths: RunPaths,
        attempt: int,
        group: dist.ProcessGroup,
        report: Reporter,
        spec: RunSpec,
    ) -> None:
        self._paths, self._attempt, self.group, self._report = paths, attempt, group, report
        self._keep, self._checksums = spec.checkpoint_keep, spec.checkpoint_checksums
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        if self._rank == 0:  # of an attempt that was interrupted while writing
            for path in paths.checkpoints.glob(".*.tmp"):
                shutil.rmtree(path, ignore_errors=True)
        self.begun_s = time.monotonic()  # the time of the last one, and its iteration
        self.begun = -1
        self.newest: int | None = None  # the iteration of the run's last good checkpoint

    def save(self, trainer: "Trainer") -> bool:
        """Write a checkpoint; return whether it succeeded. Every rank calls.

        A failure does not end the training. A newer attempt of the run does, which begins where
        Slurm has lost a node that computes on: this one may not complete what that one repeats.
        """
        from torch.distributed.checkpoint.api import CheckpointException  # slow: 0.5 s

        names, progress = list[str](), trainer.progress
        with contextlib.suppress(FileNotFoundError):  # another error is raised: no leave to write
            names = [path.name for path in self._paths.attempts.iterdir()]
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        if newest > self._attempt:
            raise RuntimeError(
                f"attempt {self._attempt} is fenced: attempt {newest} of this run has begun"
            )
        self.begun_s, self.begun = time.monotonic(), progress.iteration
        tensors = shared_tensors(trainer)  # first, as it settles the strategy
        tensors |= {f"rank.{self._rank}.{name}": t for name, t in own_tensors(trainer).items()}
        manifest = {
            "progress": dict(vars(progress)),
            "layout": trainer.strategy.layout(),
            "spec": dict(vars(trainer.spec)),
            "classes": trainer.data.classes,
            "torch": torch.__version__,
        }
        folder = self._paths.checkpoints / f"{self.begun:08d}-{self._attempt}"
        beside = folder.with_name(f".{folder.name}.tmp")
        try:
            size = self._write(beside, folder, tensors, manifest)
        except (Exception, CheckpointException) as error:
            if self._rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
            why = _root_cause(error)
            if "inline_container" in why:  # torch's archive, which names no reason of the system
                why = f"is the disk full, or a quota? {why}"
            last = "there is none" if self.newest is None else f"the last is of {self.newest}"
            self._report.warn(
                f"the checkpoint of iteration {self.begun} could not be written ({why}); {last}"
            )
            return False
        self.newest, time_s = self.begun, time.monotonic() - self.begun_s
        self._report.record(
            "checkpoint", action="saved", iteration=self.begun, bytes=size, time_s=time_s
        )
        self._report.log(f"checkpoint of iteration {self.begun}: {size:,} bytes, {time_s:.3f} s")
        if self._rank == 0:
            prune(self._paths.checkpoints, self._attempt, self._keep)
        return True

    def _write(
        self, beside: Path, folder: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]
    ) -> int:
        """Write a checkpoint, under its temporary name first; return its bytes."""
        import torch.distributed.checkpoint as dcp

        def entries() -> dict[str, dict[str, Any]]:
            """The files of this rank."""
            paths = [*beside.glob(f"__{self._rank}_*")]
            paths += [beside / ".metadata"] if self._rank == 0 else []
            sums = {p.name: {"sha256": _sha256(p)} for p in paths} if self._checksums else {}
            return {p.name: {"bytes": p.stat().st_size} | sums.get(p.name, {}) for p in paths}

        def publish() -> None:
            if self._rank == 0:
                write_json(beside / MANIFEST, manifest | {"files": files})
                beside.rename(folder)

        writer = dcp.FileSystemWriter(beside, sync_files=True)
        dcp.save(tensors, storage_writer=writer, process_group=self.group)
        parts = gather(self._each(entries), self.group)
        files = {name: entry for part in parts for name, entry in part.items()}
        self._each(publish)
        return sum(entry["bytes"] for entry in files.values())

    def _each(self, act: Callable[[], T]) -> T:
        """What act gives; where it fails on one rank, raise on all of them."""
        prefix = f"rank {self._rank}: " if self._ranks > 1 else ""
        return all_or_raise(act, Exception, self.group, lambda e: prefix + _root_cause(e))


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
