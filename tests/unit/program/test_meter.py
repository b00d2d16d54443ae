"""The meter: what its records say of a loop, and that it never ends a training."""

import io
import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jobkit.metric import reader
from jobkit.program.lines import MAX_LINE_BYTES
from jobkit.program.windows import spacing
from support.place import ROOT
from support.records import records_of

PLACE = {"JOBKIT_WHY": "0", "JOBKIT_STUDY": "s", "JOBKIT_RUN_ID": "r", "JOBKIT_ATTEMPT": "0"}


class Folder:
    """The folder of a run, and programs that measure themselves in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(
        self, program: str, *, study: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program that has the meter."""
        head = f"import sys; sys.path[:0] = [{str(ROOT / 'src')!r}]; from jobkit import meter\n"
        place = {**PLACE, "JOBKIT_RUN_DIR": str(self.root / "run")} if study else {}
        words = [sys.executable, "-I", "-c", head + textwrap.dedent(program)]
        env = {**os.environ, **place, **env}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)

    def records(self, kind: str = "", name: str = "0.jsonl") -> list[dict[str, Any]]:
        """The records of a metrics file, every line of it valid; all, or of a kind."""
        return records_of(self.root / "run" / "metrics" / name, kind)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


LOOP = """
    import time
    now = [0.0]
    time.perf_counter = lambda: now[0]
    def leap(seconds): now[0] += seconds  # nothing else takes time
    meter.start(unit="samples")
    for epoch in range(2):
        def batches():
            for i in range(30):
                leap(0.004)
                yield i
        for i in meter.batches(batches()):
            leap(0.002)
            meter.step(work=8)
        with meter.paused():
            leap(0.5)
        meter.epoch(epoch, val_loss=0.25, f1=0.5)
    meter.end()
"""


def test_a_loop_is_measured_without_its_evaluation(folder: Folder) -> None:
    done = folder.run(LOOP, RANK="0", WORLD_SIZE="2")
    assert (done.returncode, done.stderr) == (0, "")
    windows = folder.records("window")
    assert [w["step"] for w in windows] == [5, 10, 15, 20, 30, 40, 50, 60]
    assert [w["steps"] for w in windows] == [5, 5, 5, 5, 10, 10, 10, 10]
    assert [w["warmup"] for w in windows] == [True, *[False] * 7]
    assert [w["work"] for w in windows] == [8 * w["steps"] for w in windows]
    assert [w["paused_s"] for w in windows] == [0, 0, 0, 0, 0, 0.5, 0, 0]
    for window in windows:
        assert window["wall_s"] == pytest.approx(0.006 * window["steps"])
        assert window["data_wait_s"] == pytest.approx(0.004 * window["steps"])
        assert window["step_p50_s"] == pytest.approx(0.006)
    epochs = [(e["epoch"], e["val_loss"], e["values"]) for e in folder.records("epoch")]
    assert epochs == [(0, 0.25, {"f1": 0.5}), (1, 0.25, {"f1": 0.5})]
    found = folder.records()
    assert (found[-1]["kind"], found[-1]["status"]) == ("run_end", "ok")
    assert (found[0]["world_size"], found[0]["source"]) == (2, "meter")
    lines = [line.removeprefix("[METRIC] ") for line in done.stdout.splitlines()]
    assert lines == (folder.root / "run/metrics/0.jsonl").read_text().splitlines()
    folder.run(LOOP)  # a second process of the attempt continues the numbers
    assert [record["seq"] for record in folder.records()] == list(range(2 * len(found)))
    assert folder.run(LOOP, RANK="1", WORLD_SIZE="2").stdout == ""  # rank 0's is the copy
    kinds = {(record["kind"], record["rank"]) for record in folder.records(name="0.r1.jsonl")}
    assert kinds == {("run_start", 1), ("window", 1)}


def test_the_work_of_a_step_is_the_studys_then_the_steps(folder: Folder) -> None:
    program = """
        meter.start(unit="samples")
        meter.step({})
        meter.end()
    """
    of_study = {"JOBKIT_WORK_PER_STEP": "100", "JOBKIT_UNIT": "tokens"}
    for work, more, expected in [
        ("", {}, (None, "samples", None)),
        ("work=3", {}, (3, "samples", "counted")),
        ("work=3", of_study, (50.0, "tokens", "stated")),
        ("work=3", {"JOBKIT_UNIT": "images"}, (3, "images", "counted")),
        ("work=3", {"JOBKIT_UNIT": "tokens"}, (None, "tokens", None)),  # samples were counted
        ("", {"JOBKIT_UNIT": "tokens"}, (None, "tokens", None)),
    ]:
        assert folder.run(program.format(work), RANK="1", WORLD_SIZE="2", **more).stderr == ""
        start, window = folder.records(name="0.r1.jsonl")[-2:]
        assert (window["work"], start["unit"], start["work_source"]) == expected


def test_a_child_that_inherits_the_rank_does_not_write_into_its_file(folder: Folder) -> None:
    program = """
        import os, subprocess, sys
        meter.start()
        for _ in range(6):
            meter.step()
        child = "from jobkit import meter; meter.start(); meter.step()"
        words = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path[:1]}; {child}"]
        done = subprocess.run(words, capture_output=True)
        print(done.returncode, done.stderr.decode())
        if os.fork() == 0:
            meter.step()
            meter.end("failed")
            sys.exit()
        os.wait()
        meter.step()
        meter.end()
    """
    said = folder.run(program).stdout
    assert "0 jobkit meter: RuntimeError: another process measures as this rank" in said
    assert [record["seq"] for record in folder.records()] == list(range(len(folder.records())))
    (warning,) = folder.records(name="0.r0.jsonl")
    assert warning["kind"] == "message" and warning["level"] == "warning"
    assert folder.records("window")[-1]["step"] == 7
    assert [record["status"] for record in folder.records("run_end")] == ["ok"]


def test_what_was_measured_is_written_where_the_program_does_not_say_its_end(
    folder: Folder,
) -> None:
    folder.run("meter.start()\nfor _ in range(8): meter.step()")
    assert folder.records("window")[-1]["step"] == 8
    assert folder.records("run_end") == []  # its exit code tells
    folder.run("meter.start()\nmeter.step()\nraise ValueError('no such file')")
    assert folder.records()[-1]["reason"] == "ValueError('no such file')"


def test_a_full_disk_is_one_warning(folder: Folder) -> None:
    # A limit of the size of files is reached as the end of a disk is: in the middle of a line.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    done = folder.run(limit + textwrap.dedent(LOOP) + "print('trained')")
    assert done.returncode == 0 and done.stdout.endswith("trained\n")
    assert done.stderr.startswith("jobkit meter: a record was lost: ")
    assert done.stderr.count("\n") == 1
    assert (folder.root / "run" / "metrics" / "0.jsonl").read_bytes() == b""


def test_what_cannot_be_recorded_does_not_end_the_training(folder: Folder) -> None:
    for call in ["meter.step(work='many')", "meter.epoch(None)"]:
        program = f"meter.start()\nfor _ in range(9): meter.step()\n{call}\n"
        done = folder.run(program + "meter.step()\nmeter.end()\nprint('trained')")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trained")


def test_without_a_study_it_prints_all(folder: Folder) -> None:
    """What is too long for a log is printed whole, as no file has it."""
    loop = LOOP.replace("f1=0.5", "**{str(i) * 9: i / 3 for i in range(99)}")
    said = folder.run(loop, study=False).stdout
    kinds = [json.loads(line[9:])["kind"] for line in said.splitlines()]
    found = list(reader.scan(io.BytesIO(said.encode())))
    assert kinds == [record["kind"] for record in found] and kinds.count("window") == 8
    wanted = {str(i) * 9: i / 3 for i in range(99)}
    assert [r["values"] for r in found if r["kind"] == "epoch"] == [wanted] * 2
    assert not (folder.root / "run").exists()
    assert max(map(len, folder.run(loop).stdout.splitlines())) < MAX_LINE_BYTES
    assert folder.records("epoch")[0]["values"] == wanted


def test_without_start_the_calls_do_nothing(folder: Folder) -> None:
    program = LOOP.replace('meter.start(unit="samples")', "")
    done = folder.run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_batches_of_a_loader_keep_its_length_and_its_errors(folder: Folder) -> None:
    program = """
        meter.start()
        print(len(meter.batches([1, 2, 3])), list(meter.batches([1, 2, 3])))
        def broken():
            yield 1
            raise OSError("no such image")
        try:
            for _ in meter.batches(broken()): pass
        except OSError as error:
            print(error)
    """
    assert folder.run(program).stdout == "3 [1, 2, 3]\nno such image\n"


def test_a_window_ends_where_all_ranks_do() -> None:
    assert [spacing(s, 100, 95) for s in (60.0, 10.0, 2.5, 1.0, 0.3, 0.01, 1e-9)] == [
        *(1, 1, 1, 10, 10, 50, 50)
    ]
    assert spacing(0.001, 1_000_000, 999_995) == 10_000
    assert [spacing(0.001, 5 + n, n) for n in (0, 4, 5, 9, 10, 49, 50)] == [5, 5, 5, 5, 10, 10, 50]
    sizes = sorted({spacing(10**-i, 10**j, 10**j) for i in range(6) for j in range(8)})
    assert all(large % small == 0 for small, large in itertools.pairwise(sizes))
