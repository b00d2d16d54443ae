"""Find a study on disk."""

from pathlib import Path

from jobkit.errors import UsageError, nearest
from jobkit.paths import logs_root

_FILES = ("plan.json", "logs.json")  # a study's folder has one of them


def find_study(given: str | Path | None = None) -> Path:
    """The folder of a study, by its path or bare name; the newest one when none is given.

    Raises UsageError that names the nearest study where there is none.
    """
    if given is None:
        return _newest()
    text = str(given)
    named = logs_root() / text
    bare = text not in ("", ".", "..") and "/" not in text
    folder = named if bare and named.is_dir() else Path(text)
    if not text or not folder.is_dir():
        raise UsageError(_unknown(text, folder))
    if (folder / "logs.json").exists():
        return folder
    if not (folder / "plan.json").exists() and is_run(folder):
        parent = folder.absolute().parent
        raise UsageError(f"{text} is the folder of one run: name its study, {parent}")
    if not (folder / "plan.json").exists() and not run_folders(folder):
        raise UsageError(f"{text} has no plan.json and no run: it is not a study")
    return folder


def _newest() -> Path:
    found = [p for name in _FILES for p in logs_root().glob(f"*/{name}")]
    plans = [(p.stat().st_mtime, p) for p in found]
    if not plans:
        single = logs_root() / "single"
        hint = f"; single runs are in {single}: name that" if single.is_dir() else ""
        raise UsageError(f"no study in {logs_root()}: start one with run_benchmarks.py{hint}")
    return max(plans)[1].parent


def _unknown(text: str, folder: Path) -> str:
    """The line for a study that is not there."""
    if folder.is_file():
        return f"{text} is a file: give the study's folder"
    known = sorted({p.parent.name for name in _FILES for p in logs_root().glob(f"*/{name}")})
    shown = f" (in {logs_root()}: {', '.join(known)})" if known else f" in {logs_root()}"
    return f"no study {text!r}{nearest(folder.name, known)}{shown}"


def is_run(folder: Path) -> bool:
    """Whether a folder is one of a run: something of a run lies in it."""
    names = ("spec.json", "metrics", "train.log", "train.log.gz")
    return any((folder / name).exists() for name in names)


def run_folders(folder: Path) -> list[Path]:
    """The folders of runs in a study's folder, by name."""
    return sorted(f for f in folder.iterdir() if f.is_dir() and is_run(f))
