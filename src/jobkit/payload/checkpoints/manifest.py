"""What a checkpoint says of itself: progress, layout, settings, and each file's SHA-256."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.files import open_regular
from jobkit.paths import read_json
from jobkit.payload.progress import Progress

MANIFEST = "manifest.json"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    progress: Progress
    layout: dict[str, Any]
    spec: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


class Broken(Exception):
    """A checkpoint cannot be used; the text says what is wrong with it."""


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself. Raises Broken where it says nothing that can be used."""
    content = read_json(folder / MANIFEST)
    if content is None:
        raise Broken(f"{MANIFEST} is absent or torn")
    if content.get("v") != VERSION:
        raise Broken(f"{MANIFEST} is of version {content.get('v')}, not {VERSION}")
    try:
        counts = {k: int(v) for k, v in content["progress"].items()}
        files = {str(k): {**v, "bytes": int(v["bytes"])} for k, v in content["files"].items()}
        layout, spec = dict(content["layout"]), dict(content["spec"])
        if min(counts.values()) < 0 or any(Path(name).name != name for name in files):
            raise ValueError
        return Manifest(Progress(**counts), layout, spec, files)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Broken(f"{MANIFEST} lacks what a manifest has") from None


def digests(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of the files that this rank wrote."""
    paths = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_file(path: Path, entry: dict[str, Any]) -> None:
    """Raise Broken where a file is not what its manifest says."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise Broken(f"{path.name} has {size:,} bytes, not {entry['bytes']:,}")
        if not path.is_file():
            raise Broken(f"{path.name} is not a regular file")
        if _sha256(path) != entry.get("sha256"):
            raise Broken(f"{path.name} is not what was written: its checksum is another")
    except OSError as error:
        raise Broken(f"{path.name}: {error.strerror}") from None
