"""The names of all files under logs/."""

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError, nearest
from jobkit.files import file_names, read_regular

# Where run.sh, hpc/ and edf.toml are: the checkout, or the copy that an installed jobkit has of it.
_COPY = Path(__file__).resolve().parent / "_kit"
INSTALLED = _COPY.is_dir()
REPOSITORY = _COPY if INSTALLED else _COPY.parents[2]

# A file or a study may be named so: nothing that a shell, a path or a web page could misread.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(what: str, name: object) -> str:
    """Return the name; raise UsageError when it could leave its folder or be misread."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise UsageError(
            f"{what} {name!r}: use letters, digits, '.', '_' and '-' only, begin with a letter or "
            "digit, no '..', at most 100 characters"
        )
    return name


def find_named(what: str, source: str | Path, folder: Path, also: tuple[str, ...] = ()) -> Path:
    """A TOML file by its path, which has a slash or ends in .toml, or by its bare name in a folder.

    A bare name is never a file of the current folder, which may be somebody else's.
    Raises UsageError that names the nearest known one; also: names that mean something else.
    """
    path, named = Path(source), folder / f"{source}.toml"
    is_path = "/" in str(source) or path.suffix == ".toml"
    if (path if is_path else named).is_file():
        return path if is_path else named
    known = [*also, *sorted(p.stem for p in folder.glob("*.toml"))]
    hint = nearest(str(source), known)
    raise UsageError(f"no {what} '{source}'{hint} (a TOML file, or one of: {', '.join(known)})")


def logs_root() -> Path:
    """Where studies are written: $JOBKIT_LOGS, else logs/ of the current folder.

    Within the checkout it is the checkout's, wherever one stands in it.
    """
    if given := os.environ.get("JOBKIT_LOGS"):
        return Path(given)
    here = Path.cwd()
    return (REPOSITORY if not INSTALLED and here.is_relative_to(REPOSITORY) else here) / "logs"


def cache_root() -> Path:
    """The user's folder for caches: $XDG_CACHE_HOME, else ~/.cache; UsageError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache"))


def expanded(path: str | Path) -> Path:
    """The absolute path, with a ~ at its beginning as the home folder; UsageError without one."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # as for a user id that has no name, in a container
        raise UsageError(f"{path}: there is no home: set HOME, or use a path without ~") from None


def data_root() -> Path:
    """Where data and prepared caches lie when --data-dir does not say."""
    return Path(os.environ.get("JOBKIT_DATA_DIR") or cache_root() / "jobkit")


class _Below:
    """A file or folder of a run or a study, by its name in the folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Path:
        return Path(owner.folder, self.name)


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. An attempt (one start of it) has files of its own."""

    folder: Path

    spec = _Below("spec.json")
    log = _Below("train.log")  # what the job printed, all attempts one after the other
    job = _Below("job.json")  # who started the newest attempt, and how to ask after it
    submission = _Below("submission.json")  # the scheduler's job; job.json comes as it starts
    script = _Below("job.sh")  # the batch script that was submitted
    site = _Below("site.sh")  # the site's set-up lines, as at submission; run.sh sources it
    scheduler_log = _Below("slurm.log")  # a link to what the batch script and Slurm itself said
    attempts = _Below("attempts")  # a folder for each attempt; making one claims its number
    metrics_folder = _Below("metrics")
    checkpoints = _Below("checkpoints")
    comm_csv = _Below("comm.csv")  # communication benchmark: a row for each operation and size
    comm_json = _Below("comm.json")  # where they were measured

    def metrics(self, attempt: int) -> Path:
        """The attempt's records, one JSON object per line."""
        return self.metrics_folder / f"{attempt}.jsonl"

    def metrics_of_rank(self, attempt: int, rank: int, what: str = "r") -> Path:
        """The windows of a rank above 0; what "s": the samples of a rank."""
        return self.metrics_folder / f"{attempt}.{what}{rank}.jsonl"

    def outcome(self, attempt: int) -> Path:
        """How the attempt ended, written by the payload."""
        return self.attempts / str(attempt) / "outcome.json"

    def fault_marker(self, attempt: int) -> Path:
        """Written by an injected fault of the attempt, right before the injection."""
        return self.attempts / str(attempt) / "fault_marker"

    def attempt_numbers(self) -> list[int]:
        """The attempts that claimed a folder or left a metrics file, oldest first."""
        names = {*file_names(self.attempts)}
        names |= {n[:-6] for n in file_names(self.metrics_folder) if n.endswith(".jsonl")}
        return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,9}", name))

    def rank_log(self, attempt: int, rank: int) -> Path:
        """What one rank logged in the attempt: time, rank, level, text."""
        return self.folder / "ranks" / str(attempt) / f"rank-{rank}.log"


@dataclass(frozen=True)
class StudyPaths:
    """The files of one study."""

    folder: Path

    plan = _Below("plan.json")
    given_logs = _Below("logs.json")  # which logs it was collected from, in place of a plan
    launcher = _Below("launcher.json")  # the process that launches it here; gone at its end
    launcher_lock = _Below(".launcher.lock")  # held by the launcher: a study has one at most
    launcher_log = _Below("launcher.log")
    submitit = _Below(".submitit")  # pickles and logs of submitit
    results = _Below("results.csv")
    epochs = _Below("epochs.csv")
    steps = _Below("steps.csv")  # some steps a row, where a program recorded or printed them
    samples = _Below("samples.csv")
    scaling = _Below("scaling.csv")
    forecast = _Below("forecast.csv")
    table_markdown = _Below("scaling.md")
    table_latex = _Below("scaling.tex")
    report = _Below("report.html")
    figures = _Below("figures")
    drill = _Below("drill.csv")

    @classmethod
    def named(cls, name: str) -> "StudyPaths":
        """The study's folder under the logs; raises UsageError for a bad name."""
        return cls(logs_root() / check_name("study name", name))

    def run(self, run_id: str) -> RunPaths:
        """The files of one run; raises UsageError for an id that could leave the folder."""
        return RunPaths(self.folder / check_name("run id", run_id))


def short_path(path: Path) -> str:
    """The path relative to the current folder where it lies below it, else the path."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short


def read_json(path: Path, follow: bool = False) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is absent, truncated or has no object.

    follow: a link is read too, as of a file that the user names.
    """
    try:
        content = json.loads(read_regular(path, follow=follow))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: under a temporary name, then renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            if isinstance(content, str):
                content = content.encode(errors="backslashreplace")  # of others' half characters
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
