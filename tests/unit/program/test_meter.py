"""The meter: what its records say of a loop, and that it never ends a training."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from jobkit.metric import reader
from jobkit.metric.line import KINDS, MAX_LINE_BYTES
from jobkit.program import single

PLACE = {"JOBKIT_STUDY": "s", "JOBKIT_RUN_ID": "r", "JOBKIT_ATTEMPT": "0"}


@pytest.fixture
def meter_py(tmp_path: Path) -> Path:
    """A folder with the meter as one file, as it is copied into an image."""
    folder = tmp_path / "copied"
    folder.mkdir()
    (folder / "meter.py").write_text(single.source())
    return folder


def run(
    meter_py: Path, program: str, *, study: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that may import the meter; its folder of the run is beside the meter's."""
    place = {**PLACE, "JOBKIT_RUN_DIR": str(meter_py.parent / "run")} if study else {}
    return subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path[:0] = [{str(meter_py)!r}]\n" + textwrap.dedent(program),
        ],
        env={**os.environ, **place, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def records(meter_py: Path, name: str = "0.jsonl") -> list[dict[str, Any]]:
    """The records of a metrics file, every line of it valid."""
    path = meter_py.parent / "run" / "metrics" / name
    with path.open("rb") as file:
        found = list(reader.read_file(file))
    assert all(isinstance(record, dict) for record in found), found
    return found  # type: ignore[return-value]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in found if record["kind"] == kind]


LOOP = """
    import time, meter
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
            meter.step(work=8, train_loss=i)
        with meter.paused():
            leap(0.5)
        meter.epoch(epoch, val_loss=0.25, f1=0.5)
    meter.end()
"""


def test_a_loop_is_measured_without_its_evaluation(meter_py: Path) -> None:
    done = run(meter_py, LOOP)
    assert (done.returncode, done.stderr) == (0, "")
    found = records(meter_py)
    windows = of_kind(found, "window")
    assert [w["step"] for w in windows] == [5, 10, 15, 20, 30, 40, 50, 60]
    assert [w["steps"] for w in windows] == [5, 5, 5, 5, 10, 10, 10, 10]
    assert [w["warmup"] for w in windows] == [True, *[False] * 7]
    assert [w["work"] for w in windows] == [8 * w["steps"] for w in windows]
    assert [w["paused_s"] for w in windows] == [0, 0, 0, 0, 0, 0.5, 0, 0]
    for window in windows:
        assert window["wall_s"] == pytest.approx(0.006 * window["steps"])
        assert window["data_wait_s"] == pytest.approx(0.004 * window["steps"])
        for name in ("step_p50_s", "step_p95_s", "step_max_s"):
            assert window[name] == pytest.approx(0.006)
    assert windows[-1]["values"] == {"train_loss": 29}
    epochs = of_kind(found, "epoch")
    assert [(e["epoch"], e["val_loss"]) for e in epochs] == [(0, 0.25), (1, 0.25)]
    assert [e["values"] for e in epochs] == [{"f1": 0.5}, {"f1": 0.5}]
    assert of_kind(found, "value") == []
    assert found[-1]["kind"] == "run_end"
    assert found[-1]["status"] == "ok"


def test_its_records_have_the_documented_fields_and_its_lines_go_to_the_log(meter_py: Path) -> None:
    done = run(meter_py, LOOP, RANK="0", WORLD_SIZE="2")
    found = records(meter_py)
    for record in found:
        own = record.keys() - {"v", "kind", "study", "run_id", "attempt", "rank", "seq", "t"}
        assert own <= KINDS[record["kind"]].keys()
    assert [record["seq"] for record in found] == list(range(len(found)))
    assert found[0]["world_size"] == 2
    assert found[0]["source"] == "meter"
    lines = [line.removeprefix("[METRIC] ") for line in done.stdout.splitlines()]
    assert lines == (meter_py.parent / "run/metrics/0.jsonl").read_text().splitlines()


def test_other_ranks_write_their_own_file_and_print_nothing(meter_py: Path) -> None:
    done = run(meter_py, LOOP, RANK="1", WORLD_SIZE="2")
    assert done.stdout == ""
    found = records(meter_py, "0.r1.jsonl")
    assert {record["kind"] for record in found} == {"run_start", "window"}
    assert {record["rank"] for record in found} == {1}


def test_the_work_of_a_step_is_the_studys_then_the_steps_then_the_starts(meter_py: Path) -> None:
    program = """
        import meter
        meter.start(unit="samples", work_per_step=10, warmup_steps=0)
        meter.step({})
        meter.end()
    """
    env = {"RANK": "1", "WORLD_SIZE": "2"}
    for work, more, expected in [
        ("", {}, (5.0, "samples", "stated")),
        ("work=3", {}, (3, "samples", "counted")),
        (
            "work=3",
            {"JOBKIT_WORK_PER_STEP": "100", "JOBKIT_UNIT": "tokens"},
            (50.0, "tokens", "stated"),
        ),
        ("work=3", {"JOBKIT_UNIT": "images"}, (3, "images", "counted")),
        ("work=3", {"JOBKIT_UNIT": "tokens"}, (None, "tokens", None)),  # samples were counted
        ("", {"JOBKIT_UNIT": "tokens"}, (None, "tokens", None)),
    ]:
        assert run(meter_py, program.format(work), **env, **more).stderr == ""
        start, window = records(meter_py, "0.r1.jsonl")[-2:]
        assert (window["work"], start["unit"], start["work_source"]) == expected


def test_a_second_process_of_the_attempt_continues_the_numbers(meter_py: Path) -> None:
    run(meter_py, LOOP)
    first = len(records(meter_py))
    run(meter_py, LOOP)
    assert [record["seq"] for record in records(meter_py)] == list(range(2 * first))


def test_a_child_that_inherits_the_rank_does_not_write_into_its_file(meter_py: Path) -> None:
    program = """
        import os, subprocess, sys, meter
        meter.start()
        for _ in range(6):
            meter.step()
        child = "import sys; sys.path[:0] = %r; import meter; meter.start(); meter.step()"
        done = subprocess.run([sys.executable, "-c", child % sys.path[:1]], capture_output=True)
        print(done.returncode, done.stderr.decode())
        if os.fork() == 0:
            meter.step()
            meter.end("failed")
            sys.exit()
        os.wait()
        meter.step()
        meter.end()
    """
    done = run(meter_py, program)
    assert "0 jobkit meter: RuntimeError: another process measures as this rank" in done.stdout
    found = records(meter_py)
    assert [record["seq"] for record in found] == list(range(len(found)))
    assert of_kind(found, "window")[-1]["step"] == 7
    assert [record["status"] for record in of_kind(found, "run_end")] == ["ok"]


def test_what_was_measured_is_written_where_the_program_does_not_say_its_end(
    meter_py: Path,
) -> None:
    run(meter_py, "import meter\nmeter.start()\nfor _ in range(8): meter.step()")
    found = records(meter_py)
    assert of_kind(found, "window")[-1]["step"] == 8
    assert of_kind(found, "run_end") == []  # its exit code tells
    run(meter_py, "import meter\nmeter.start()\nmeter.step()\nraise ValueError('no such file')")
    assert records(meter_py)[-1]["reason"] == "ValueError('no such file')"


def test_a_short_program_that_ends_at_once_loses_few_steps(meter_py: Path) -> None:
    program = """
        import os, time, meter
        now = [0.0]
        time.perf_counter = lambda: now[0]
        meter.start()
        for _ in range(48):
            now[0] += 0.01
            meter.step()
        os._exit(0)
    """
    assert run(meter_py, program).returncode == 0
    windows = of_kind(records(meter_py), "window")
    assert sum(w["steps"] for w in windows if not w["warmup"]) == 35
    assert windows[-1]["step"] == 40


def test_a_full_disk_is_one_warning(meter_py: Path) -> None:
    # A limit of the size of files is reached as the end of a disk is: in the middle of a line.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    done = run(meter_py, limit + textwrap.dedent(LOOP) + "print('trained')")
    assert done.returncode == 0 and done.stdout.endswith("trained\n")
    assert done.stderr.startswith("jobkit meter: a record was lost: ")
    assert done.stderr.count("\n") == 1
    assert (meter_py.parent / "run" / "metrics" / "0.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "wrong",
    [
        "meter.step(work='many')",
        "meter.step(train_loss=object())",
        "meter.epoch(None)",
        "meter.value(1, [])",
    ],
)
def test_what_cannot_be_recorded_does_not_end_the_training(meter_py: Path, wrong: str) -> None:
    program = f"import meter\nmeter.start()\nfor _ in range(9): meter.step()\n{wrong}\n"
    done = run(meter_py, program + "meter.step()\nmeter.end()\nprint('trained')")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "trained"


def test_without_a_study_it_prints_and_may_be_silenced(meter_py: Path) -> None:
    done = run(meter_py, LOOP, study=False)
    kinds = [json.loads(line[9:])["kind"] for line in done.stdout.splitlines()]
    assert kinds == [record["kind"] for record in reader.scan(iter_of(done.stdout))]
    assert kinds.count("window") == 8
    assert run(meter_py, LOOP, study=False, JOBKIT_METER="0").stdout == ""
    assert not (meter_py.parent / "run").exists()


def iter_of(text: str) -> Any:
    from io import BytesIO

    return BytesIO(text.encode())


def test_without_start_the_calls_do_nothing(meter_py: Path) -> None:
    program = LOOP.replace('meter.start(unit="samples")', "").replace("0.5)", "0)")
    done = run(meter_py, program + "    print(meter.stop_requested())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_many_values_never_make_a_line_too_long(meter_py: Path) -> None:
    program = """
        import meter
        meter.start(warmup_steps=0)
        many = {f"a_long_name_of_a_value_{i}": i / 3 for i in range(40)}
        meter.step(**many)
        meter.epoch(0, **many)
        meter.end()
    """
    done = run(meter_py, program)
    assert max(map(len, done.stdout.splitlines())) < MAX_LINE_BYTES
    wanted = {f"a_long_name_of_a_value_{i}": i / 3 for i in range(40)}
    for kind in ("window", "epoch"):
        assert of_kind(records(meter_py), kind)[0]["values"] == wanted
    alone = run(meter_py, program, study=False).stdout  # no file has them
    assert of_kind([json.loads(line[9:]) for line in alone.splitlines()], "epoch")[0]["values"]


def test_a_stop_signal_is_a_request(meter_py: Path) -> None:
    program = """
        import os, signal, time, meter
        meter.start()
        print(meter.stop_requested())
        os.kill(os.getpid(), signal.SIGUSR2)
        print(meter.stop_requested())
    """
    done = run(meter_py, program)
    assert (done.returncode, done.stdout) == (0, "False\nTrue\n")


def test_in_a_pod_term_is_a_request_of_a_program_that_asks(meter_py: Path) -> None:
    program = """
        import os, signal, meter
        meter.start()
        print(meter.stop_requested(), flush=True)
        if not (child := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.kill(os.getpid(), signal.SIGTERM)
        print(meter.stop_requested())
    """
    done = run(meter_py, program, JOBKIT_POD="1")
    assert (done.returncode, done.stdout) == (0, "False\n-15\nTrue\n")
    assert run(meter_py, program).returncode == -signal.SIGTERM
    silent = program.replace("print(meter.stop_requested(), flush=True)", "")
    assert run(meter_py, silent, JOBKIT_POD="1").returncode == -signal.SIGTERM


def test_the_batches_of_a_loader_keep_its_length_and_its_errors(meter_py: Path) -> None:
    program = """
        import meter
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
    assert run(meter_py, program).stdout == "3 [1, 2, 3]\nno such image\n"


def test_a_window_ends_where_all_ranks_do() -> None:
    from jobkit.program.step_times import spacing

    assert [spacing(s, 100, 95) for s in (60.0, 10.0, 2.5, 1.0, 0.3, 0.01, 1e-9)] == [
        *(1, 1, 1, 10, 10, 50, 50)
    ]
    assert spacing(0.001, 1_000_000, 999_995) == 10_000
    assert [spacing(0.001, 5 + n, n) for n in (0, 4, 5, 9, 10, 49, 50)] == [5, 5, 5, 5, 10, 10, 50]
    sizes = sorted({spacing(10**-i, 10**j, 10**j) for i in range(6) for j in range(8)})
    assert all(large % small == 0 for small, large in itertools.pairwise(sizes))


def test_the_meter_of_jobkit_is_the_one_that_is_copied() -> None:
    from jobkit import meter

    space: dict[str, Any] = {"__name__": "copied"}
    exec(compile(single.source(), "meter.py", "exec", dont_inherit=True), space)
    public = {n for n in vars(meter) if not n.startswith("_")}
    assert public <= space.keys()
    assert space["__doc__"] == meter.__doc__
    record = {"v": 1, "kind": "value", "value": 0.1, "t": time.time(), "name": "[METRIC] é"}
    from jobkit.metric.line import encode

    assert space["encode"](record) == encode(record)
