"""FIFOs, devices and endless files in the place of every file that is read."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.files import open_regular, read_regular
from support.fake_study import FakeRun, make_plan

# Calls a function of one path. In a process of its own with a time limit: it must end.
CALL = """
import importlib, resource, sys
from pathlib import Path
from jobkit.errors import UsageError
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
module, name, *words = sys.argv[1:]
function = importlib.import_module(module)
for part in name.split("."):
    function = getattr(function, part)
try:
    print("gave", function(*[Path(w) if "/" in w else w for w in words]))
except (UsageError, OSError) as error:
    print("refused", error)
except Exception as error:
    if type(error).__name__ != "Corrupt":
        raise
    print("refused", error)
"""


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def folder(path: Path) -> None:
    path.mkdir()


MAKERS = [fifo, zero, sparse, folder]
READERS = [
    ("jobkit.paths", "read_json"),
    ("jobkit.spec.plan", "Plan.read"),
    ("jobkit.spec.study_file", "read_toml"),
    ("jobkit.metric.comm", "read_csv"),
    ("jobkit.metric.comm", "read_lines"),
]


def call(module: str, name: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", CALL, module, name, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("module", "name"), READERS)
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, module: str, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "x.toml")
    done = call(module, name, str(tmp_path / "x.toml"))
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.startswith(("refused", "gave None")) and done.stdout.count("\n") == 1


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "name",
    ["job.json", "submission.json", "attempts/0/outcome.json", "metrics/0.jsonl", "train.log"],
)
def test_status_and_collect_end_whatever_lies_in_a_study(
    name: str, make: Callable[[Path], None]
) -> None:
    if make is sparse and name in ("metrics/0.jsonl", "train.log"):
        make = fifo  # a log has no bound: it is read in blocks
    plan = make_plan("s", strategies=("ddp",), gpus=(1,))
    run_id, spec = next(iter(plan.runs.items()))
    FakeRun(plan.paths.folder, run_id, spec).begin().train(0, 1, 2).end()
    path = plan.paths.folder / run_id / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    for words in (["status", "s"], ["collect", "s"]):
        command = [sys.executable, "-m", "jobkit", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert "Traceback" not in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["manifest.json", "train_images", "train_labels"])
def test_a_cache_with_what_is_no_file_is_found_at_fault(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    from jobkit.payload.data.cache import ensure_cache, find_fault
    from jobkit.payload.data.sources import find_source

    if make is sparse and name == "train_labels":
        return  # of the right owner and another checksum: read in blocks, to its end
    cache = ensure_cache(find_source("synthetic", tmp_path, 8, 8), tmp_path, lambda line: None)
    (cache / name).unlink()
    make(cache / name)
    assert find_fault(cache)


@pytest.mark.parametrize("make", MAKERS)
def test_a_checkpoint_with_what_is_no_file_is_passed_over(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    from jobkit.payload.checkpoints.manifest import Corrupt, check_file

    make(tmp_path / "x")
    with pytest.raises(Corrupt):
        check_file(tmp_path / "x", {"bytes": 0, "sha256": ""})


@given(st.binary(max_size=200), st.integers(0, 200))
def test_a_file_is_read_whole_or_refused(content: bytes, most: int) -> None:
    path = Path(os.environ["JOBKIT_LOGS"]).with_name("file")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if len(content) > most:
        with pytest.raises(OSError, match="larger than"):
            read_regular(path, most)
    else:
        assert read_regular(path, most) == content


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"
