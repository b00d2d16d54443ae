"""Find a study on disk, and read its plan or what stands for one."""

from collections.abc import Collection
from pathlib import Path

from jobkit.errors import UsageError, nearest
from jobkit.files import file_names, is_there
from jobkit.paths import check_name, logs_root, read_json
from jobkit.spec.plan import Plan, Study, read_spec
from jobkit.spec.planned import PlannedRun

_FILES = ("plan.json", "logs.json")  # a study's folder has one of them


def find_study(given: str | Path | None = None, *, planned: bool = False) -> Path:
    """The folder of a study, by its path or bare name; the newest one when none is given.

    planned: the newest of those with a plan: a list of logs has no runs to look at or to end.
    Raises UsageError that names the nearest study where there is none.
    """
    if given is None:
        return _newest(planned)
    text = str(given)
    named = logs_root() / text
    bare = text not in ("", ".", "..") and "/" not in text
    try:
        folder = named if bare and named.is_dir() else Path(text)
        there = bool(text) and folder.is_dir()
    except OSError as error:  # too long for a name
        raise UsageError(f"no study {text!r}: {error.strerror}") from None
    if not there:
        raise UsageError(_unknown(text, folder))
    if is_there(folder / "logs.json"):
        return folder
    if not is_there(folder / "plan.json") and is_run(folder):
        parent = folder.absolute().parent
        raise UsageError(f"{text} is the folder of one run: name its study, {parent}")
    if not is_there(folder / "plan.json") and not run_folders(folder):
        raise UsageError(f"{text} has no plan.json and no run: it is not a study")
    return folder


def is_of_logs(folder: Path) -> bool:
    """Whether a study's folder lists logs that exist already, and plans no run."""
    return is_there(folder / "logs.json") and not is_there(folder / "plan.json")


def read_plan(folder: Path) -> Plan:
    """The plan of a study's folder or, where single jobs have none, that of the runs in it.

    Raises UsageError where a plan cannot be read, and without one where no run has a spec.json.
    """
    if is_there(folder / "plan.json"):
        return Plan.read(folder / "plan.json")
    found = {f.name: spec for f in run_folders(folder) if (spec := own_spec(f))}
    runs = {check_name("run id", name): spec for name, spec in found.items()}
    if not runs:
        raise UsageError(f"{folder} has no plan.json, and no run in it has a spec.json")
    return Plan(study=Study(name="single"), runs=runs, folder=folder)


def own_spec(folder: Path) -> PlannedRun | None:
    """The spec that lies in a run's folder, where this version can read it."""
    try:
        return read_spec((read_json(folder / "spec.json") or {})["spec"])
    except (KeyError, TypeError, AttributeError, UsageError):
        return None


def _newest(planned: bool) -> Path:
    seen = [p for p in _plans() if p.name == "plan.json" or not planned]
    plans = [(when, p) for p in seen if (when := _written(p)) is not None]
    if not plans:
        single = logs_root() / "single"
        hint = f"; single runs are in {single}: name that" if single.is_dir() else ""
        raise UsageError(f"no study in {logs_root()}: start one with run_benchmarks.py{hint}")
    return max(plans)[1].parent


def _plans() -> list[Path]:
    """What every study has that can be seen: its plan, or the list of its logs."""
    plans = (logs_root() / name / file for name in file_names(logs_root()) for file in _FILES)
    return [path for path in plans if is_there(path)]


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # the study was just removed
        return None


def _unknown(text: str, folder: Path) -> str:
    """The line for a study that is not there."""
    if folder.is_file():
        return f"{text} is a file: give the study's folder"
    known = sorted({p.parent.name for p in _plans()})
    shown = f" (in {logs_root()}: {', '.join(known)})" if known else f" in {logs_root()}"
    return f"no study {text!r}{nearest(folder.name, known)}{shown}"


def is_run(folder: Path) -> bool:
    """Whether a folder is one of a run: something of a run lies in it."""
    names = ("spec.json", "metrics", "train.log")
    return any(is_there(folder / name) for name in names)


def run_folders(folder: Path, but: Collection[str] = ()) -> list[Path]:
    """The folders of runs in a study's folder, by name; but: names that are left out."""
    return [f for n in sorted({*file_names(folder)}.difference(but)) if is_run(f := folder / n)]
