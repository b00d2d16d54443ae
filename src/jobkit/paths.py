"""The names of all files under logs/."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError, nearest
from jobkit.files import file_names, load_json, read_regular, write_parts

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
    if not is_path and path.is_file():
        hint = f"; is it the file ./{source}?"
    raise UsageError(f"no {what} '{source}'{hint} (a TOML file, or one of: {', '.join(known)})")


def logs_root() -> Path:
    """Where studies are written: $JOBKIT_LOGS, else logs/ of the current folder.

    Within the checkout it is the checkout's, wherever one stands in it.
    """
    if given := os.environ.get("JOBKIT_LOGS"):
        return Path(given)
    here = Path.cwd()
    within = not INSTALLED and here.is_relative_to(REPOSITORY)
    return (REPOSITORY if within else here) / "logs"


def cache_root() -> Path:
    """The user's folder for caches: $XDG_CACHE_HOME, else ~/.cache.

    Raises UsageError where there is no home: without HOME, and a user id that has no name.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise UsageError(
            f"HOME is not set, and user id {os.geteuid()} has no home: set JOBKIT_DATA_DIR, HOME "
            "or XDG_CACHE_HOME"
        ) from None


def expanded(path: str | Path) -> Path:
    """The absolute path, with a ~ at its beginning as the home folder; UsageError without one."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"{path}: {error}: write the path without ~") from None


def data_root() -> Path:
    """Where data and prepared caches lie when --data-dir does not say."""
    if given := os.environ.get("JOBKIT_DATA_DIR"):
        return Path(given)
    return cache_root() / "jobkit"


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. An attempt (one start of it) has files of its own."""

    folder: Path

    @property
    def names(self) -> list[str]:
        """What lies in the folder."""
        return file_names(self.folder)

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    @property
    def log(self) -> Path:
        """What the job printed, all attempts one after the other."""
        return self.folder / "train.log"

    @property
    def job(self) -> Path:
        """Who started the newest attempt, and how to ask after it."""
        return self.folder / "job.json"

    @property
    def submission(self) -> Path:
        """Which job of a scheduler was made for the run; job.json is written as it starts."""
        return self.folder / "submission.json"

    @property
    def script(self) -> Path:
        """The batch script that was submitted."""
        return self.folder / "job.sh"

    @property
    def site(self) -> Path:
        """The site's set-up lines, as they were at submission; run.sh sources it."""
        return self.folder / "site.sh"

    @property
    def scheduler_log(self) -> Path:
        """What the batch script and Slurm itself said: a link to it."""
        return self.folder / "slurm.log"

    @property
    def attempts(self) -> Path:
        """A folder for each attempt; making one claims its number."""
        return self.folder / "attempts"

    @property
    def metrics_folder(self) -> Path:
        return self.folder / "metrics"

    def metrics(self, attempt: int) -> Path:
        """The attempt's records, one JSON object per line."""
        return self.folder / f"metrics/{attempt}.jsonl"

    def metrics_of_rank(self, attempt: int, rank: int, what: str = "r") -> Path:
        """The windows of a rank above 0; what "s": the samples of a rank."""
        return self.metrics_folder / f"{attempt}.{what}{rank}.jsonl"

    def outcome(self, attempt: int) -> Path:
        """How the attempt ended, written by the payload."""
        return self.folder / f"attempts/{attempt}/outcome.json"

    def fresh_start(self, attempt: int) -> Path:
        """Exists if the attempt started from scratch, not from an earlier one's checkpoint."""
        return self.attempts / str(attempt) / "fresh_start"

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

    def trace(self, attempt: int, rank: int) -> Path:
        """What torch.profiler saw of one rank in the attempt."""
        return self.folder / "profiles" / f"{attempt}-rank-{rank}.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def comm_csv(self) -> Path:
        """What the communication benchmark measured: a row for each operation and size."""
        return self.folder / "comm.csv"

    @property
    def comm_json(self) -> Path:
        """The lines fitted to those times, and where they were measured."""
        return self.folder / "comm.json"


@dataclass(frozen=True)
class StudyPaths:
    """The files of one study."""

    folder: Path

    @classmethod
    def named(cls, name: str) -> "StudyPaths":
        """The study's folder under the logs; raises UsageError for a bad name."""
        return cls(logs_root() / check_name("study name", name))

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def given_logs(self) -> Path:
        """Which logs the study was collected from, in place of a plan."""
        return self.folder / "logs.json"

    @property
    def launcher(self) -> Path:
        """Who launches the study on this machine, while it does."""
        return self.folder / "launcher.json"

    @property
    def launcher_lock(self) -> Path:
        """Locked by the launcher at work, so that a study has one at most."""
        return self.folder / ".launcher.lock"

    @property
    def launcher_log(self) -> Path:
        return self.folder / "launcher.log"

    @property
    def collect_log(self) -> Path:
        return self.folder / "collect.log"

    @property
    def collect_job(self) -> Path:
        """The job that collects when all others have ended."""
        return self.folder / ".collect-job.json"

    @property
    def submitit(self) -> Path:
        """What submitit writes: pickles and its own logs."""
        return self.folder / ".submitit"

    @property
    def results(self) -> Path:
        return self.folder / "results.csv"

    @property
    def epochs(self) -> Path:
        return self.folder / "epochs.csv"

    @property
    def steps(self) -> Path:
        """Some steps a row, where a program recorded or printed them."""
        return self.folder / "steps.csv"

    @property
    def samples(self) -> Path:
        return self.folder / "samples.csv"

    @property
    def scaling(self) -> Path:
        return self.folder / "scaling.csv"

    @property
    def forecast(self) -> Path:
        return self.folder / "forecast.csv"

    @property
    def table_markdown(self) -> Path:
        return self.folder / "scaling.md"

    @property
    def table_latex(self) -> Path:
        return self.folder / "scaling.tex"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def figures(self) -> Path:
        return self.folder / "figures"

    @property
    def drill(self) -> Path:
        return self.folder / "drill.csv"

    def run(self, run_id: str) -> RunPaths:
        """The files of one run; raises UsageError for an id that could leave the folder."""
        return RunPaths(self.folder / check_name("run id", run_id))


def short_path(path: Path) -> str:
    """The path relative to the current folder where it lies below it, else the path."""
    try:
        short = os.path.relpath(path)
    except OSError:  # the current folder was removed
        return str(path)
    return str(path) if short.startswith("..") else short


def read_json(path: Path, follow: bool = False) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is absent, truncated or has no object.

    follow: a link is read too, as of a file that the user names.
    """
    try:
        content = load_json(read_regular(path, follow=follow))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: under a temporary name, then renamed."""
    write_parts(path, [text.encode(errors="backslashreplace")])  # of others' half characters
