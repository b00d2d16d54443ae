"""When checkpoints are written, what stays, and how an attempt ends that is not the newest."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from jobkit.paths import RunPaths
from support.cuts import (
    DATA,
    ITERATIONS,
    RUN,
    actions,
    final,
    kept,
    measured,
    same,
    warnings,
    write_models,
)
from support.rigs import Result, Start

HOW = (*RUN, "--model", "own_models:noisy")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("own"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[RunPaths]:
    """A run whose checkpoints/ is a file system of half a MiB: two checkpoints and a little."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root, to mount a small file system")
    paths = RunPaths(tmp_path / "run")
    paths.checkpoints.mkdir(parents=True)
    size = ("-o", "size=640k")
    if subprocess.run(["mount", "-t", "tmpfs", *size, "none", paths.checkpoints]).returncode:
        pytest.skip("the kernel lets nobody mount a file system here")
    yield paths
    subprocess.run(["umount", paths.checkpoints], check=True)


@pytest.mark.parametrize("words", [(), ("--checkpoint-async",)])
def test_a_full_disk_is_told_and_training_goes_on(
    forge: Start, own: Path, small_disk: RunPaths, words: tuple[str, ...]
) -> None:
    often = ("--checkpoint-every", "4", "--checkpoint-keep", "9")
    done = forge(2, *HOW, *often, *words, run_dir=small_disk.folder, cwd=str(own))
    assert done.codes == [0, 0], done.out
    assert done.record("run_end")["status"] == "ok"
    saved = [iteration for _, iteration in actions(done)]
    assert saved
    assert saved[-1] < ITERATIONS
    assert kept(done) == [f"{iteration:08d}-0" for iteration in saved]
    text = warnings(done)
    assert f"the checkpoint of iteration {ITERATIONS} could not be written" in text
    assert "No space left on device" in text
    assert f"the last is of {saved[-1]}" in text
    assert "Traceback" not in done.out
    again = forge(
        2, *HOW, "--attempt", "1", "--resume-from", str(small_disk.folder),
        run_dir=small_disk.folder, cwd=str(own),
    )  # fmt: skip
    assert actions(again, 1)[0] == ("loaded", saved[-1])


def test_by_time_beside_the_training_and_no_more_than_are_kept(forge: Start, own: Path) -> None:
    straight = forge(2, *HOW, "--checkpoint-every", "epoch", cwd=str(own))
    timed = ("--checkpoint-every", "0.1s", "--checkpoint-keep", "3")
    for words in ((), ("--checkpoint-async",)):
        done = forge(2, *HOW, *timed, *words, cwd=str(own))
        assert done.codes == [0, 0], done.out
        saved = [iteration for _, iteration in actions(done)]
        assert saved == sorted(set(saved))
        assert saved[-1] == ITERATIONS
        assert kept(done) == [f"{iteration:08d}-0" for iteration in saved[-3:]]
        assert same(final(straight), final(done)) == []


def test_each_time_comes_once(forge: Start, own: Path) -> None:
    """Two ranks wish for a checkpoint at the same time: it is written once, not twice in a row."""
    many = (*DATA, "--epochs", "12", "--global-batch-size", "4", "--model", "own_models:plain")
    done = forge(2, *many, "--checkpoint-every", "0.1s", cwd=str(own))
    saved = [iteration for _, iteration in actions(done)][:-1]  # the last is that of the end
    assert len(saved) > 3
    twice = sum(b - a == 1 for a, b in pairwise(saved))
    assert twice < len(saved) // 3, saved


def test_what_was_left_half_written_is_cleared(forge: Start, own: Path) -> None:
    how = (*HOW, "--checkpoint-every", "epoch")
    first = forge(1, *how, cwd=str(own), env={"JOBKIT_FAULT": "kill@8"})
    unfinished = first.paths.checkpoints / ".00000007-0.tmp"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half of it")
    second = forge(1, *how, "--attempt", "1", run_dir=first.paths.folder, cwd=str(own))
    assert actions(second, 1)[0] == ("loaded", 6)
    assert kept(second) == ["00000018-1", "00000024-1"]


def test_which_attempts_go_on_and_which_begin_anew(forge: Start, own: Path) -> None:
    how = (*HOW, "--checkpoint-every", "4")
    first = forge(1, *how, cwd=str(own))

    def attempt(number: int, *words: str, **env: str) -> Result:
        number_is = ("--attempt", str(number))
        return forge(1, *how, *number_is, *words, run_dir=first.paths.folder, cwd=str(own), env=env)

    # After one that came to its end the run is trained once more.
    done = attempt(1, JOBKIT_FAULT="kill@18:0:1")
    assert actions(done, 1)[0] == ("saved", 4)
    assert kept(done) == ["00000012-1", "00000016-1"]
    done = attempt(2, "--fresh", JOBKIT_FAULT="kill@9:0:2")
    assert actions(done, 2) == [("saved", 4), ("saved", 8)]
    # Neither does a later one go back before that, nor does a requeue lose what was done.
    done = attempt(3, JOBKIT_FAULT="kill@11:0:3")
    assert actions(done, 3) == [("loaded", 8)]
    done = attempt(4, "--fresh", JOBKIT_RESTARTS="1", JOBKIT_FAULT="kill@13:0:4")
    assert actions(done, 4) == [("loaded", 8), ("saved", 12)]
    done = attempt(5, "--fresh", JOBKIT_FAULT="kill@3:0:5")
    assert actions(done, 5) == []
    done = attempt(6)
    assert actions(done, 6)[0] == ("saved", 4)
    assert measured(first)[0] == [m for m in measured(done, 7) if m[0] == 0][-1]


def test_an_attempt_that_is_not_the_newest_ends(forge: Start, own: Path, tmp_path: Path) -> None:
    """The job was requeued while its first start went on somewhere."""
    paths = RunPaths(tmp_path / "run")

    def requeue() -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and not list(paths.checkpoints.glob("*-0")):
            time.sleep(0.01)
        (paths.attempts / "1").mkdir(parents=True)

    thread = threading.Thread(target=requeue)
    thread.start()
    endless = (*DATA, "--epochs", "100000", "--global-batch-size", "16", "--threads", "1")
    done = forge(
        2, *endless, "--model", "own_models:plain", "--checkpoint-every", "3", run_dir=paths.folder,
        cwd=str(own),
    )  # fmt: skip
    thread.join()
    assert None not in done.codes
    assert 0 not in done.codes
    assert "attempt 0 is fenced: attempt 1 of this run has begun" in str(done.outcome)
    assert not list(paths.checkpoints.glob(".*"))
    began = (paths.attempts / "1").stat().st_mtime
    assert max(r["t"] for r in done.records("checkpoint")) < began + 60
    late = [r for r in done.records("epoch") if r["t"] > began + 60]
    assert late == []
