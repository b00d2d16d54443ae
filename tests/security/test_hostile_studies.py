"""Studies that somebody else made, at random: no command executes, signals or writes for them."""

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobkit.spec.plan import Plan
from support.fake_study import make_plan, whole_run
from support.hostile import SECRET, in_child, snapshot

PRECIOUS = f"alias ll='ls -l' # {SECRET}-of-another-file\n"
WORDS = [
    "",
    "..",
    "-x",
    "=1+1",
    "a\nb",
    "\x1b[2J\x1b]0;x\x07",
    "\u202e",
    "\x00",
    "x" * 70_000,
    "$(id)",
]
NUMBERS = [0, -1, 1, 2**63, 10**400, 1e308, float("nan"), float("inf"), True, 1.5, 99999999999]
SCALARS = st.sampled_from([*WORDS, *NUMBERS, None])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=5,
)
FILES = ("plan.json", "launcher.json", ".collect-job.json", ".launcher.lock", "results.csv")
OF_RUN = ("job.json", "submission.json", "spec.json", "train.log", "slurm.log")
OF_RUN += ("metrics/0.jsonl", "metrics/1.jsonl", "attempts/0/outcome.json", "attempts/7")
PLACES = st.sampled_from([*FILES, *(f"RUN/{name}" for name in OF_RUN)])
FOLDERS = st.sampled_from(["RUN", "RUN/metrics", "RUN/attempts", "RUN/attempts/0", "figures"])


def emptied(path: Path) -> Path:
    """A path at which nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: emptied(path).symlink_to(target)


def sparse(path: Path) -> None:
    with emptied(path).open("wb") as file:
        file.truncate(1 << 40)


def text(content: bytes) -> Callable[[Path], None]:
    return lambda path: void(emptied(path).write_bytes(content))


def void(_: object) -> None:
    """Nothing."""


KINDS: list[Callable[[Path], None]] = [
    link_to("/dev/zero"), link_to("OUTSIDE/precious"), link_to("OUTSIDE"), link_to("OUTSIDE/new"),
    link_to("."), lambda path: os.mkfifo(emptied(path)), lambda path: emptied(path).mkdir(), sparse,
    text(b""), text(b"\xff\xfe" * 99), text(b"[" * 100_000), text(b'{"a":' * 50_000),
    text(b"[[]," * 500_000), text(b"\n" * 3_000_000), text(b"null"), text(b"{}"), text(b"1" * 9999),
]  # fmt: skip


def replaced(path: Path, key: str, value: Any) -> None:
    """Give a key of a JSON file another value, wherever it stands."""
    try:
        content = json.loads(path.read_bytes()[: 1 << 20])
    except (OSError, ValueError, RecursionError):
        content = {}

    def inside(part: Any, level: int) -> Any:
        if isinstance(part, dict):
            return {k: value if k == key else inside(v, level + 1) for k, v in part.items()}
        return [inside(v, level + 1) for v in part] if isinstance(part, list) else part

    content = inside(content, 0)
    if isinstance(content, dict) and key not in json.dumps(content):
        content[key] = value
    text(json.dumps(content).encode())(path)


KEYS = st.sampled_from([
    "run_id", "study", "name", "spec", "runs", "notes", "settings", "sweep", "strategies", "gpus",
    "repeats", "strategy", "lr", "pid", "pid_start", "host", "job_id", "run_ids", "started",
    "ended",
    "submitted", "exit_code", "child", "first_attempt", "status", "reason", "shared", "launcher",
])  # fmt: skip
KINDS_OF_RECORDS = st.sampled_from(["epoch", "run_start", "run_end", "message"])
OF_RECORD = ("epoch", "val_loss", "images_per_s", "t", "text", "spec", "versions")
RECORDS = st.fixed_dictionaries({"kind": KINDS_OF_RECORDS, **dict.fromkeys(OF_RECORD, VALUES)})
CHANGES = st.one_of(
    st.tuples(st.just("kind"), PLACES | FOLDERS, st.sampled_from(range(len(KINDS)))),
    st.tuples(st.just("value"), PLACES, st.tuples(KEYS, VALUES)),
    st.tuples(st.just("record"), PLACES, RECORDS | st.binary(max_size=80)),
    st.tuples(st.just("mode"), PLACES | FOLDERS, st.sampled_from([0o777, 0o000, 0o666, 0o4755])),
    st.tuples(st.just("name"), st.sampled_from(WORDS[3:7]), st.just(None)),
)


def change(plan: Plan, outside: Path, what: str, place: str, how: Any) -> None:
    """Make one change to a study."""
    run = next(iter(plan.runs))
    path = plan.paths.folder / place.replace("RUN", run)
    if what == "name":
        (plan.paths.folder / place / "metrics").mkdir(parents=True, exist_ok=True)
    elif what == "kind":
        KINDS[how](path)
        if path.is_symlink() and "OUTSIDE" in (target := os.readlink(path)):  # noqa: PTH115
            link_to(target.replace("OUTSIDE", str(outside)))(path)
    elif what == "value":
        replaced(path, *how)
    elif what == "record":
        line = how if isinstance(how, bytes) else json.dumps(how).encode()
        if path.is_file() and not path.is_symlink():
            with path.open("ab") as file:
                file.write(b"[METRIC] " + line + b"\n")
    elif path.exists() and not path.is_symlink():
        path.chmod(how)


def commands(name: str) -> object:
    """Look at a study, collect it, end it and plan to launch it again; return the exit codes."""
    from jobkit.analysis.cli import collect_main
    from jobkit.launch.cancel import main as cancel
    from jobkit.launch.cli import main as launch
    from jobkit.launch.follow.status import main as status

    mains: list[tuple[Any, list[str]]] = [(status, []), (status, ["--json"]), (collect_main, [])]
    codes = [main([name, *words]) for main, words in [*mains, (cancel, [])]]
    words = ["--study", "demo", "--name", name, "--site", "local", "--no-wait"]
    codes.append(launch([*words, "--dry-run"]))
    return json.dumps([int(code) for code in codes])


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Import once what the children need."""
    import jobkit.analysis.cli
    import jobkit.launch.cli
    import jobkit.launch.follow.view
    import jobkit.launch.launcher  # noqa: F401


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(CHANGES, min_size=1, max_size=4), st.booleans())
def test_no_command_harms_whoever_looks_at_a_study(changes: list[Any], ended: bool) -> None:
    root = Path(tempfile.mkdtemp(prefix="hostile-"))
    outside, before = root / "outside", dict(os.environ)
    outside.mkdir()
    (outside / "precious").write_text(PRECIOUS)
    os.environ |= {"JOBKIT_LOGS": str(root / "logs"), "WANDB_API_KEY": SECRET, "PATH": "/nowhere"}
    try:
        plan = make_plan("s", strategies=("ddp",), gpus=(1, 2), settings={"epochs": 2})
        for run_id in plan.runs if ended else ():
            whole_run(plan, run_id)
        for one in changes:
            change(plan, outside, *one)
        kept = snapshot(outside)
        done = in_child(lambda: commands("s"))
        assert done.faults == []
        assert set(json.loads(str(done.code))) <= {0, 1, 2, 3}, done.out
        assert snapshot(outside) == kept
        assert holding(root / "logs", SECRET) == [] and SECRET not in done.out
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(root)


def holding(folder: Path, marker: str) -> list[Path]:
    """The files of a folder in which a marker stands; links are not followed."""
    files = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    small = [p for p in files if p.stat().st_size < 1 << 24]
    return [p for p in small if marker.encode() in p.read_bytes()]


def test_the_watch_sees_what_it_looks_for() -> None:
    """The test above can fail: each fault is noticed."""
    import subprocess

    def harm() -> object:
        for act in (lambda: os.kill(os.getppid(), 15), lambda: subprocess.run(["touch", "x"])):
            with contextlib.suppress(OSError):
                act()
        print("\x1b[2J", len(bytearray(random.randbytes(1)) * (600 << 20)))
        raise RuntimeError("x")

    done = in_child(harm)
    assert done.signalled and done.started == ["touch"] and "RuntimeError" in done.error
    assert len(done.faults) == 5
