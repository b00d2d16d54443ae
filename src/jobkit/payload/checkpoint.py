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

import hashlib
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from jobkit.files import open_regular
from jobkit.payload.batches import Progress
from jobkit.payload.distributed import T, all_or_raise
from jobkit.payload.report import Reporter

if TYPE_CHECKING:
    from jobkit.payload.train import Trainer

MANIFEST = "manifest.json"
LOSS_SUM = "epoch.loss_sum"
BUFFER, STRATEGY = "buffer.", "strategy."
CPU_STATE, GPU_STATE = "random.cpu", "random.cuda"
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
Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # of tensors, by name
Group = dist.ProcessGroup | None  # of the ranks, on the CPU; None: one process alone


class Corrupt(Exception):
    """A checkpoint cannot be used; the text says what is wrong with it."""


class Fenced(RuntimeError):
    """A newer attempt of the run has begun: this stale one must not write any more."""


class Unsaved(Exception):
    """A checkpoint could not be written, and nothing of it is left; the text says why."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    progress: Progress
    layout: dict[str, Any]
    spec: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(entry["bytes"] for entry in self.files.values())


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


def check(folder: Path, group: Group = None) -> tuple[Manifest, Any]:
    """Manifest and index of a checkpoint whose files match them; Corrupt, on every rank."""
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)

    def check_share() -> None:
        manifest, index = read_manifest(folder), read_index(folder)
        for name in sorted(manifest.files)[rank::ranks]:
            _check_file(folder / name, manifest.files[name])
        used = {info.relative_path for info in index.storage_data.values()}
        if strange := sorted(used - manifest.files.keys()):
            raise Corrupt(f"its index names {strange[0]!r}, which is not in {MANIFEST}")
        result.append((manifest, index))

    result: list[tuple[Manifest, Any]] = []  # an index is large: the ranks do not send it
    all_or_raise(check_share, Corrupt, group)
    return result[0]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raises Corrupt for one that cannot be used."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        progress = Progress(*(int(content["progress"][f.name]) for f in fields(Progress)))
        files = {str(k): {**v, "bytes": int(v["bytes"])} for k, v in content["files"].items()}
        inside = all(Path(name).name == name for name in files)
        if not inside or min(vars(progress).values()) < 0:
            raise ValueError
        return Manifest(progress, dict(content["layout"]), dict(content["spec"]), files)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Corrupt(f"{MANIFEST} is absent, truncated or lacks fields") from None


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
        if (module, name) not in _INDEX:
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


def shapes_in(index: Any) -> Shapes:
    """The shape and type of every tensor in a checkpoint, by name."""
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
    }


def writers(names: Iterable[str]) -> list[int]:
    """The ranks that put tensors of their own into a checkpoint of these names."""
    ranks = {n.split(".")[1] for n in names if n.startswith("rank.") and n.endswith(LOSS_SUM)}
    return sorted(int(rank) for rank in ranks if rank.isdecimal())


def read(folder: Path, index: Any, tensors: dict[str, Tensor], group: Group = None) -> None:
    """Fill the tensors, in place, from a checkpoint; a sharded one gets its shard.

    index: as check() gave it. Raises Corrupt, on every rank, if a tensor is absent or has another
    shape.
    """
    import torch.distributed.checkpoint as dcp  # a slow import that few runs need
    from torch.distributed.checkpoint.api import CheckpointException

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            index.storage_meta.load_id = self.load_id
            return index

    try:
        dcp.load(tensors, storage_reader=Reader(folder), process_group=group, no_dist=group is None)
    except (Exception, CheckpointException) as error:
        raise Corrupt(_root_cause(error)) from error


# --- writing -----------------------------------------------------------------------------------


def shared_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    """Parameters and optimizer state that this rank holds: the live tensors, not copies."""
    trainer.strategy.settle()
    state = trainer.optimizer.state
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.strategy.named_parameters().items():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}.{key}"] = value
    return tensors


def own_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    """The tensors that differ between the ranks."""
    strategy = trainer.strategy
    tensors = {f"{BUFFER}{name}": b for name, b in strategy.named_buffers().items()}
    tensors |= {f"{STRATEGY}{name}": t for name, t in strategy.own_state().items()}
    tensors[CPU_STATE] = torch.get_rng_state()
    if strategy.device.type == "cuda":
        tensors[GPU_STATE] = torch.cuda.get_rng_state(strategy.device)
        for gpu in range(1, strategy.devices):  # dp drives several
            tensors[f"{GPU_STATE}.{gpu}"] = torch.cuda.get_rng_state(gpu)
    tensors[LOSS_SUM] = trainer.loss_sum
    return tensors


class Checkpoints:
    """Writes a run's checkpoints, keeps the newest, and reports each. Every rank has one."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        group: dist.ProcessGroup,
        report: Reporter,
        *,
        keep: int,
        checksums: bool = False,
        background: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """folder: checkpoints/ of the run. keep: how many stay.

        background: write copies in a thread, while training continues. device: the rank's; a thread
        begins on GPU 0, which may be another rank's.
        """
        self.folder, self._attempt, self.group, self._report = folder, attempt, group, report
        self._keep, self._checksums = keep, checksums
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        on_gpu = device is not None and device.type == "cuda"
        begin = (torch.cuda.set_device, (device,)) if on_gpu else (None, ())
        self._thread = ThreadPoolExecutor(1, "checkpoint", *begin) if background else None
        if self._rank == 0:  # of an attempt that was interrupted while writing
            for path in folder.glob(".*.tmp"):
                shutil.rmtree(path, ignore_errors=True)
        self.writing: Future[tuple[int, float]] | None = None  # its result: bytes and seconds
        self.begun_s = time.monotonic()  # the time of the last one, and its iteration
        self.begun = -1
        self.newest: int | None = None  # the iteration of the run's last good checkpoint

    def save(self, trainer: "Trainer") -> bool:
        """Write a checkpoint, or start to; return whether it succeeded so far. Every rank calls.

        Raises Fenced, on every rank, where a newer attempt of the run has begun: a node that was
        lost to the scheduler may compute on, and would remove what that one resumes from.
        """
        self.wait()
        all_or_raise(self._check_fence, Fenced, self.group)
        progress = trainer.progress
        self.begun_s, self.begun = time.monotonic(), progress.iteration
        own = own_tensors(trainer)
        tensors = shared_tensors(trainer) | {f"rank.{self._rank}.{k}": t for k, t in own.items()}
        folder = self.folder / f"{progress.iteration:08d}-{self._attempt}"
        manifest = {
            "progress": dict(vars(progress)),
            "layout": trainer.strategy.layout(),
            "spec": dict(vars(trainer.spec)),
            "torch": torch.__version__,
        }
        if self._thread:
            tensors = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
            self.writing = self._thread.submit(self._write, folder, tensors, manifest)
            return True
        self.writing = Future()
        try:
            self.writing.set_result(self._write(folder, tensors, manifest))
        except Unsaved as error:
            self.writing.set_exception(error)
        return self.wait()

    def _check_fence(self) -> None:
        names = [path.name for path in (self.folder.parent / "attempts").glob("*")]
        newest = max((int(n) for n in names if n.isdecimal()), default=self._attempt)
        if self._rank == 0 and newest > self._attempt:
            raise Fenced(
                f"attempt {self._attempt} is fenced: attempt {newest} of this run has begun"
            )

    def wait(self) -> bool:
        """Wait for a checkpoint that is being written and report it; return whether it succeeded.

        A failure does not end the training.
        """
        if self.writing is None:
            return True
        writing, self.writing = self.writing, None
        try:
            size, time_s = writing.result()
        except Unsaved as error:
            last = "there is none" if self.newest is None else f"the last is of {self.newest}"
            self._report.warn(
                f"the checkpoint of iteration {self.begun} could not be written ({error}); {last}"
            )
            return False
        self.newest = self.begun
        self._report.record(
            "checkpoint", action="saved", iteration=self.begun, bytes=size, time_s=time_s
        )
        self._report.log(f"checkpoint of iteration {self.begun}: {size:,} bytes, {time_s:.3f} s")
        if self._rank == 0:
            prune(self.folder, self._attempt, self._keep)
        return True

    def _write(
        self, folder: Path, tensors: dict[str, Tensor], manifest: dict[str, Any]
    ) -> tuple[int, float]:
        """Write a checkpoint; return its bytes and the seconds that it took.

        Raises Unsaved, on every rank, if one of them could not write.
        """
        started, beside = time.monotonic(), folder.with_name(f".{folder.name}.tmp")
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

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

        def make_room() -> None:
            if self._rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)

        def entries() -> dict[str, dict[str, Any]]:
            paths = [*beside.glob(f"__{self._rank}_*")]
            paths += [beside / ".metadata"] if self._rank == 0 else []
            sums = {p.name: {"sha256": _sha256(p)} for p in paths} if self._checksums else {}
            return {p.name: {"bytes": p.stat().st_size} | sums.get(p.name, {}) for p in paths}

        def publish() -> None:
            if self._rank == 0:
                with (beside / MANIFEST).open("w", encoding="utf-8") as file:
                    json.dump(manifest, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                beside.rename(folder)

        try:
            self._each(make_room)
            writer = Writer(beside, sync_files=True)
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
            files = {name: entry for part in self._each(entries) for name, entry in part.items()}
            manifest["files"] = files
            self._each(publish)
        except (Exception, CheckpointException) as error:
            if self._rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
            raise Unsaved(_root_cause(error)) from error
        return sum(entry["bytes"] for entry in files.values()), time.monotonic() - started

    def _each(self, act: Callable[[], T]) -> list[T]:
        """Every rank's result of act; where it fails on one rank, raise on all of them."""
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
