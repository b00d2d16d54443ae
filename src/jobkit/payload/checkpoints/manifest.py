"""The manifest of a checkpoint: progress, layout, settings, and each file's size."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jobkit.files import open_regular
from jobkit.paths import read_json
from jobkit.payload.progress import Progress

MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    progress: Progress
    layout: dict[str, Any]
    spec: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


class Corrupt(Exception):
    """A checkpoint cannot be used; the text says what is wrong with it."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raises Corrupt for one that cannot be used."""
    content = read_json(folder / MANIFEST)
    if content is None:
        raise Corrupt(f"{MANIFEST} is absent or truncated")
    if content.get("v") != VERSION:
        raise Corrupt(f"{MANIFEST} has version {content.get('v')}, not {VERSION}")
    try:
        counts = {k: int(v) for k, v in content["progress"].items()}
        files = {str(k): {**v, "bytes": int(v["bytes"])} for k, v in content["files"].items()}
        layout, spec = dict(content["layout"]), dict(content["spec"])
        if counts.keys() != {each.name for each in fields(Progress)} or min(counts.values()) < 0:
            raise ValueError
        if any(Path(name).name != name for name in files):
            raise ValueError
        return Manifest(Progress(**counts), layout, spec, files)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Corrupt(f"{MANIFEST} lacks required fields") from None


def entries(folder: Path, rank: int, checksums: bool) -> dict[str, dict[str, Any]]:
    """The size of each file that this rank wrote; its SHA-256 too where checksums are wanted."""
    paths = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    return {
        path.name: {"bytes": path.stat().st_size} | ({"sha256": _sha256(path)} if checksums else {})
        for path in paths
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_file(path: Path, entry: dict[str, Any]) -> None:
    """Raise Corrupt if a file has another size than its manifest says, or another checksum."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise Corrupt(f"{path.name} has {size:,} bytes, not {entry['bytes']:,}")
        if not path.is_file():
            raise Corrupt(f"{path.name} is not a regular file")
        if "sha256" in entry and _sha256(path) != entry["sha256"]:
            raise Corrupt(f"{path.name} has another checksum than when it was written")
    except OSError as error:
        raise Corrupt(f"{path.name}: {error.strerror}") from None
