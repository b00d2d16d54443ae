"""The meter: what its records say of a loop, and that it never ends a training."""

import io
import itertools
import json
import textwrap
from pathlib import Path

import pytest

from jobkit.metric import reader
from jobkit.program.lines import MAX_LINE_BYTES
from jobkit.program.windows import spacing
from support.records import records_of
from support.warm_programs import Ran, run


def measured(folder: Path, program: str, **env: str) -> Ran:
    program = "from jobkit import meter\n" + textwrap.dedent(program)
    return run(folder, program, JOBKIT_AUTO="0", **env)


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


def test_a_loop_is_measured_without_its_evaluation(tmp_path: Path) -> None:
    done = measured(tmp_path, LOOP, RANK="0", WORLD_SIZE="2")
    assert (done.codes, done.err) == ([0], [""])
    windows = done.records("window")
    assert [w["step"] for w in windows] == [5, 10, 15, 20, 30, 40, 50, 60]
    assert [w["steps"] for w in windows] == [5, 5, 5, 5, 10, 10, 10, 10]
    assert [w["warmup"] for w in windows] == [True, *[False] * 7]
    assert [w["work"] for w in windows] == [8 * w["steps"] for w in windows]
    assert [w["paused_s"] for w in windows] == [0, 0, 0, 0, 0, 0.5, 0, 0]
    for window in windows:
        assert window["wall_s"] == pytest.approx(0.006 * window["steps"])
        assert window["data_wait_s"] == pytest.approx(0.004 * window["steps"])
        assert window["step_p50_s"] == pytest.approx(0.006)
    epochs = [(e["epoch"], e["val_loss"], e["values"]) for e in done.records("epoch")]
    assert epochs == [(0, 0.25, {"f1": 0.5}), (1, 0.25, {"f1": 0.5})]
    found = done.records()
    assert (found[-1]["kind"], found[-1]["status"]) == ("run_end", "ok")
    assert (found[0]["world_size"], found[0]["source"]) == (2, "meter")
    lines = [line.removeprefix("[METRIC] ") for line in done.out[0].splitlines()]
    assert lines == (done.metrics / "0.jsonl").read_text().splitlines()
    measured(tmp_path, LOOP)  # a second process of the attempt continues the numbers
    assert [record["seq"] for record in done.records()] == list(range(2 * len(found)))
    assert measured(tmp_path, LOOP, RANK="1", WORLD_SIZE="2").out == [""]  # rank 0's is the copy
    kinds = {(record["kind"], record["rank"]) for record in done.records(rank=1)}
    assert kinds == {("run_start", 1), ("window", 1)}


def test_the_work_of_a_step_is_the_studys_then_the_steps(tmp_path: Path) -> None:
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
        ran = measured(tmp_path, program.format(work), RANK="1", WORLD_SIZE="2", **more)
        start, window = ran.records(rank=1)[-2:]
        assert ran.err == [""]
        assert (window["work"], start["unit"], start["work_source"]) == expected


def test_a_child_that_inherits_the_rank_does_not_write_into_its_file(tmp_path: Path) -> None:
    program = """
        import os, subprocess, sys
        meter.start()
        for _ in range(6):
            meter.step()
        child = "from jobkit import meter; meter.start(); meter.step()"
        done = subprocess.run([sys.executable, "-c", child], capture_output=True)
        print(done.returncode, done.stderr.decode())
        if os.fork() == 0:
            meter.step()
            meter.end("failed")
            sys.exit()
        os.wait()
        meter.step()
        meter.end()
    """
    ran = measured(tmp_path, program)
    assert "0 jobkit meter: RuntimeError: another process measures as this rank" in ran.out[0]
    assert [record["seq"] for record in ran.records()] == list(range(len(ran.records())))
    (warning,) = records_of(ran.metrics / "0.r0.jsonl")
    assert warning["kind"] == "message" and warning["level"] == "warning"
    assert ran.records("window")[-1]["step"] == 7
    assert [record["status"] for record in ran.records("run_end")] == ["ok"]


def test_what_was_measured_is_written_where_the_program_says_no_end(tmp_path: Path) -> None:
    ran = measured(tmp_path, "meter.start()\nfor _ in range(8): meter.step()")
    assert ran.records("window")[-1]["step"] == 8
    assert ran.records("run_end") == []  # its exit code tells
    ran = measured(tmp_path, "meter.start()\nmeter.step()\nraise ValueError('no such file')")
    assert ran.records()[-1]["reason"] == "ValueError('no such file')"


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    # A limit of the size of files is reached as the end of a disk is: in the middle of a line.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    done = measured(tmp_path, limit + textwrap.dedent(LOOP) + "print('trained')")
    assert done.codes == [0] and done.out[0].endswith("trained\n")
    assert done.err[0].startswith("jobkit meter: a record was lost: ")
    assert done.err[0].count("\n") == 1
    assert (done.metrics / "0.jsonl").read_bytes() == b""


def test_what_cannot_be_recorded_does_not_end_the_training(tmp_path: Path) -> None:
    for call in ["meter.step(work='many')", "meter.epoch(None)"]:
        program = f"meter.start()\nfor _ in range(9): meter.step()\n{call}\n"
        done = measured(tmp_path, program + "meter.step()\nmeter.end()\nprint('trained')")
        assert (done.codes, done.out[0].splitlines()[-1]) == ([0], "trained")


def test_without_a_study_it_prints_all(tmp_path: Path) -> None:
    """What is too long for a log is printed whole, as no file has it."""
    loop = LOOP.replace("f1=0.5", "**{str(i) * 9: i / 3 for i in range(99)}")
    (said,) = measured(tmp_path, loop, JOBKIT_RUN_DIR="").out
    kinds = [json.loads(line[9:])["kind"] for line in said.splitlines()]
    found = list(reader.scan(io.BytesIO(said.encode())))
    assert kinds == [record["kind"] for record in found] and kinds.count("window") == 8
    wanted = {str(i) * 9: i / 3 for i in range(99)}
    assert [r["values"] for r in found if r["kind"] == "epoch"] == [wanted] * 2
    assert not (tmp_path / "run").exists()
    ran = measured(tmp_path, loop)
    assert max(map(len, ran.out[0].splitlines())) < MAX_LINE_BYTES
    assert [r["values"] for r in ran.records("epoch")] == [wanted] * 2


def test_without_start_the_calls_do_nothing(tmp_path: Path) -> None:
    done = measured(tmp_path, LOOP.replace('meter.start(unit="samples")', ""))
    assert (done.codes, done.out, done.err) == ([0], [""], [""])


def test_the_batches_of_a_loader_keep_its_length_and_its_errors(tmp_path: Path) -> None:
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
    assert measured(tmp_path, program).out[0] == "3 [1, 2, 3]\nno such image\n"


def test_a_window_ends_where_all_ranks_do() -> None:
    found = [spacing(s, 100, 95) for s in (60.0, 10.0, 2.5, 1.0, 0.3, 0.01, 1e-9)]
    assert found == [1, 1, 1, 10, 10, 50, 50]
    assert spacing(0.001, 1_000_000, 999_995) == 10_000
    assert [spacing(0.001, 5 + n, n) for n in (0, 4, 5, 9, 10, 49, 50)] == [5, 5, 5, 5, 10, 10, 50]
    sizes = sorted({spacing(10**-i, 10**j, 10**j) for i in range(6) for j in range(8)})
    assert all(large % small == 0 for small, large in itertools.pairwise(sizes))
