"""Runs the parts of a GPU check, each in its time limit; what is done is not run again."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jobkit.checks.gpu_check.expected import Measure
from jobkit.checks.gpu_check.results import PROCESSES
from jobkit.checks.gpu_check.setting import Part, Setting
from jobkit.errors import one_line
from jobkit.paths import read_json, write_json

_GRACE_S = 15.0  # between TERM and KILL: launchers end their ranks in it
PASS, FAIL, NOT = "pass", "FAIL", "not measured"


@dataclass
class Result:
    """What a part ended with."""

    part: str
    state: str  # pass, FAIL or not measured
    reason: str = ""
    took_s: float = 0.0
    limit_s: int = 0
    measures: list[Measure] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it to a file."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Result | None":
        """Return the result in a file; None where there is none that can be read."""
        content: dict[str, Any] | None = read_json(path)
        if content is None:
            return None
        try:
            measures = [Measure(**one) for one in content.pop("measures")]
            return cls(**content, measures=measures)
        except (KeyError, TypeError):
            return None


def run_part(part: Part, setting: Setting) -> Result:
    """Run a part and keep its result in its folder; one that is there already is returned.

    A part that fails never ends the check: what went wrong is its reason.
    """
    folder = setting.folder / part.name
    kept = folder / "result.json"
    if found := Result.load(kept):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    result = Result(part.name, NOT, part.why_not(setting), limit_s=part.limit_s)
    if not result.reason:
        with _watching(folder) if part.watched else contextlib.nullcontext():
            result.state, result.reason = _commands(part, setting, folder)
        try:
            result.measures = part.read(folder)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            said = one_line(f"its results cannot be read: {type(error).__name__}: {error}")
            result.state, result.reason = FAIL, result.reason or said
        if result.state == PASS and any(m.verdict == FAIL for m in result.measures):
            result.state, result.reason = FAIL, "a number is outside of its bounds"
        result.took_s = time.monotonic() - start
    result.save(kept)
    return result


@contextlib.contextmanager
def _watching(folder: Path) -> Iterator[None]:
    """List the processes on each GPU every second meanwhile, where nvidia-smi is there."""
    words = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader", "-l", "1"]
    with (folder / PROCESSES).open("wb") as out, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            watch = subprocess.Popen(words, stdin=-3, stdout=out, stderr=-3, start_new_session=True)
            stack.callback(_end, watch)
        yield


def _commands(part: Part, setting: Setting, folder: Path) -> tuple[str, str]:
    """Run all commands of a part, also after one that fails; return the state and the reason."""
    end, wrong = time.monotonic() + part.limit_s, []
    for words in part.commands(setting):
        left = end - time.monotonic()
        if left <= 0:
            return FAIL, f"over its limit of {part.limit_s} s before: {_short(words)}"
        code = run_command(words, setting.environ(part), folder / "log.txt", left)
        if code is None:
            return FAIL, f"over its limit of {part.limit_s} s in: {_short(words)}"
        if code:
            wrong.append(f"exit code {code} of: {_short(words)}")
    return (FAIL, "; ".join(wrong)) if wrong else (PASS, "")


def _short(words: Sequence[str]) -> str:
    """Return a command for people, without the paths of programs."""
    return one_line(" ".join(w if "/" not in w else Path(w).name for w in words))[:160]


def run_command(
    words: Sequence[str], environ: dict[str, str], log: Path, limit_s: float
) -> int | None:
    """Run a command, its output added to a log; return its code, None where the time was up.

    All of its process group is ended then, and on an interrupt, which is raised again.
    """
    with log.open("ab") as out:
        out.write(f"\n$ {json.dumps(list(words))}\n".encode())
        out.flush()
        try:
            process = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            out.write(f"{error}\n".encode())
            return 127
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            out.write(f"ended: over its limit of {limit_s:.0f} s\n".encode())
            return None
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its group: TERM first, that launchers end what they have started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
