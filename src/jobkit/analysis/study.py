"""Find a study on disk, and the runs that it is to have."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import UsageError, nearest
from jobkit.paths import RunPaths, StudyPaths, logs_root, read_json
from jobkit.plan import Plan
from jobkit.spec import RunSpec
from jobkit.status import is_alive


@dataclass(frozen=True)
class StudyRuns:
    """The runs of a study: all that are planned or, without a plan, all that left something."""

    paths: StudyPaths
    specs: dict[str, RunSpec | None]  # by run_id; None: no readable spec
    folders: dict[str, RunPaths]
    record_ids: dict[str, str | None]  # the run_id that a run's records carry; None: any
    unplanned: tuple[str, ...] = ()  # folders of runs that the plan does not know
    launched: frozenset[str] = frozenset()  # runs that a launcher at work is to start


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
    if not (folder / "plan.json").exists() and _is_run(folder):
        parent = folder.absolute().parent
        raise UsageError(f"{text} is the folder of one run: give its study, {parent}")
    if not (folder / "plan.json").exists() and not _run_folders(folder):
        raise UsageError(f"{text} holds no plan.json and no run: it is no study")
    return folder


def read_study(folder: Path) -> StudyRuns:
    """The runs of a study's folder; raises UsageError where its plan cannot be read."""
    paths = StudyPaths(folder)
    present = _run_folders(folder)
    if not paths.plan.exists():
        return StudyRuns(
            paths,
            {f.name: _own_spec(f) for f in present},
            {f.name: RunPaths(f) for f in present},
            {f.name: _own_id(f) for f in present},
        )
    planned = Plan.read(paths.plan).runs
    return StudyRuns(
        paths,
        dict(planned),
        {run_id: paths.run(run_id) for run_id in planned},
        {run_id: run_id for run_id in planned},
        tuple(f.name for f in present if f.name not in planned),
        _launched(paths, planned),
    )


def _launched(paths: StudyPaths, planned: Mapping[str, RunSpec]) -> frozenset[str]:
    """The runs that a launcher on this machine is at work on."""
    record = read_json(paths.launcher)
    if not record or not is_alive(record):
        return frozenset()
    return frozenset(planned) & frozenset(record.get("run_ids", planned))


def _newest() -> Path:
    plans = [(p.stat().st_mtime, p) for p in logs_root().glob("*/plan.json")]
    if not plans:
        single = logs_root() / "single"
        hint = f"; single runs lie in {single}: give that" if single.is_dir() else ""
        raise UsageError(f"no study in {logs_root()}: start one with run_benchmarks.py{hint}")
    return max(plans)[1].parent


def _unknown(text: str, folder: Path) -> str:
    """The line for a study that is not there."""
    if folder.is_file():
        return f"{text} is a file: give the study's folder"
    known = sorted(p.parent.name for p in logs_root().glob("*/plan.json"))
    shown = f" (in {logs_root()}: {', '.join(known)})" if known else f" in {logs_root()}"
    return f"no study {text!r}{nearest(folder.name, known)}{shown}"


def _is_run(folder: Path) -> bool:
    names = ("spec.json", "metrics", "train.log", "train.log.gz")
    return any((folder / name).exists() for name in names)


def _run_folders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and _is_run(f))


def _own_id(folder: Path) -> str | None:
    """The run_id that a run's records carry, also after its folder was renamed."""
    said = (read_json(folder / "spec.json") or {}).get("run_id")
    return said if isinstance(said, str) else None


def _own_spec(folder: Path) -> RunSpec | None:
    """The spec that lies in a run's folder, where this version can read it."""
    try:
        return RunSpec.from_dict((read_json(folder / "spec.json") or {})["spec"])
    except (KeyError, TypeError, AttributeError, UsageError):
        return None
