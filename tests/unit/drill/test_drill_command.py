"""A drill of a command: where it is hit, and what its row says; the places are stand-ins."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jobkit.drill.fault_run import FaultRun
from jobkit.drill.faults import FAULTS
from jobkit.drill.place import MARK, LocalPlace, Started, end_marked, signal_ranks
from jobkit.drill.possible import impossible
from jobkit.drill.program import Command, printed_steps, steps_of
from jobkit.drill.row import Row
from jobkit.errors import UsageError
from jobkit.metric.line import MetricWriter
from jobkit.paths import RunPaths, write_json
from jobkit.spec.planned import PlannedRun

PROGRAM = Command(words=("python", "train.py"), at=5, after_s=None, minutes=10)
FROM_OUTSIDE = {
    "kill", "hang", "warning", "term", "scancel", "time-limit", "preemption", "slurmd", "node",
    "link", "slurmctld",
}  # fmt: skip


def printed(attempt: int, steps: range) -> str:
    lines = [f"[METRIC] step={step} loss=0.5" for step in steps]
    return "\n".join([f"[jobkit] start: attempt {attempt} of x on here", *lines, ""])


@dataclass(kw_only=True)
class FakeStart(Started):
    """A start that is over once its condition says so."""

    ended: Callable[[], bool]
    code: int = 0

    def look(self) -> bool:
        self.begins = self.begins or [time.time()]
        if self.ended() and not self.over:
            self.over, self.said = True, f"ended with exit code {self.code}"
            self.ends.append(time.time())
        return not self.over

    def cancel(self) -> None:
        self.ended = lambda: True


@dataclass
class FakePlace(LocalPlace):
    """Attempt 0 prints steps until it is told to end; the one after it ends well."""

    after: range  # the steps of attempt 1
    ends: dict[str, object]  # outcome.json of attempt 0
    told: list[str] = field(default_factory=list)
    poll_s = 0.0

    def start(
        self, spec: PlannedRun, paths: RunPaths, env: Mapping[str, str], again: bool, more: object
    ) -> Started:
        assert spec.arguments()[-2:] == ["python", "train.py"] and spec.world_size == 2
        assert env == {MARK: "m"}, "a command is told of no fault"
        number = len(paths.attempt_numbers())
        paths.outcome(number).parent.mkdir(parents=True)
        with paths.log.open("a") as log:
            log.write(printed(number, self.after if number else range(1, 8)))
        if number:
            write_json(paths.outcome(number), {"status": "ok", "exit_code": 0})
            return FakeStart(ended=lambda: True)
        return FakeStart(ended=lambda: bool(self.told), code=75)

    def warn(self, started: Started) -> None:
        self.told.append("warned")
        write_json(self.paths.outcome(0), self.ends)

    paths = RunPaths(Path())


def run_of(tmp_path: Path, place: FakePlace, name: str, program: Command = PROGRAM) -> Row:
    place.paths = RunPaths(tmp_path / name)
    return FaultRun(
        fault=program.case(FAULTS[name]), place=place, paths=place.paths, program=program,
        mark="m", patience_s=300, say=print, halted=threading.Event(),
    ).run()  # fmt: skip


STOPPED = {"status": "preempted", "exit_code": 75, "reason": "rank 0: exit code 75"}


@pytest.mark.parametrize(
    ("after", "redone"),
    [(range(8, 12), 0), (range(6, 12), 2), (range(1, 12), 7)],  # the last has no checkpoint
)
def test_a_command_that_comes_back_is_good(tmp_path: Path, after: range, redone: int) -> None:
    row = run_of(tmp_path, FakePlace(after, STOPPED), "warning")
    assert (row.first_status, row.final_status, row.attempts) == ("preempted", "ok", 2)
    assert row.evidence == "rank 0: exit code 75" and row.iterations_lost == redone
    assert row.same_parameters is None and row.good, row


def test_a_command_without_a_handler_is_told_as_such_and_good(tmp_path: Path) -> None:
    why = "rank 1: ended by the stop signal, SIGUSR2, which the command does not handle"
    ends = {"status": "failed", "exit_code": 140, "reason": why}
    row = run_of(tmp_path, FakePlace(range(1, 8), ends), "warning")
    assert (row.first_status, row.evidence, row.final_status) == ("failed", why, "ok")
    assert row.good and row.iterations_lost == 7


def test_a_command_that_heeds_no_signal_is_not_good(tmp_path: Path) -> None:
    row = run_of(tmp_path, FakePlace(range(0), {"status": "ok", "exit_code": 0}), "warning")
    assert (row.first_status, row.final_status, row.attempts) == ("ok", "ok", 1)
    assert "as if there had been no fault" in row.note and not row.good


def test_a_command_that_ended_before_the_fault_was_not_hit(tmp_path: Path) -> None:
    later = Command(words=PROGRAM.words, at=50, after_s=None, minutes=10)
    place = FakePlace(range(0), {})
    place.told.append("ended at once")
    row = run_of(tmp_path, place, "warning", later)
    assert row.note == "the run ended with exit code 75 before the fault" and not row.good


def test_what_comes_from_outside_can_be_done_to_a_command() -> None:
    cases = {name: PROGRAM.case(fault) for name, fault in FAULTS.items()}
    assert {name for name, case in cases.items() if not PROGRAM.impossible(case)} == FROM_OUTSIDE
    assert "only jobkit's own training" in PROGRAM.impossible(cases["bit-flip"])
    place = LocalPlace()
    assert impossible(place, cases["kill"]) == ""
    place.sees_processes = False  # as on a cluster's login node
    assert "needs --local or --minicluster" in impossible(place, cases["kill"])


# --- where a command is hit -----------------------------------------------------------------------


def test_steps_are_those_of_windows_or_of_lines(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.metrics_folder.mkdir(parents=True)
    paths.log.write_text(printed(0, range(1, 4)) + "[METRIC] step=4 lo\n" + printed(1, range(3, 9)))
    assert steps_of(paths, 0) == printed_steps(paths, 0) == [1, 2, 3]
    assert printed_steps(paths, 1) == [*range(3, 9)] and printed_steps(paths, 2) == []
    writer = MetricWriter(
        study="s", run_id="run", attempt=0, rank=0, path=paths.metrics(0), log=None
    )
    writer.write("run_start", unit=None)
    writer.write("window", step=25)
    writer.close()
    assert steps_of(paths, 0) == [25]
    assert time.time() - 300 < (PROGRAM.began(paths, 0) or 0) < time.time() + 1
    assert PROGRAM.began(paths, 1) is None


def test_a_command_without_records_is_hit_after_so_many_seconds(tmp_path: Path) -> None:
    timed = Command(words=("sleep", "9"), at=5, after_s=20, minutes=10)
    run = FaultRun(
        fault=FAULTS["term"], place=LocalPlace(), paths=RunPaths(tmp_path), program=timed,
        mark="m", say=print, halted=threading.Event(),
    )  # fmt: skip
    run.starts.append(Started())
    assert not timed.reached(run)
    run.started.begins.append(time.time() + 1000)
    assert not timed.reached(run)
    run.started.begins[0] = time.time() - 21
    assert timed.reached(run) and timed.where() == "after 20 s"


@pytest.mark.parametrize(
    ("log", "at", "after_s", "said"),
    [
        ("quiet\n", 5, None, "recorded no step: say when, as --after SECONDS"),
        (printed(0, range(1, 6)), 5, None, "--at 5: the command made 5 steps: say fewer"),
        ("quiet\n", 5, 30.0, "--after 30: the command took 30 s"),
    ],
)
def test_a_fault_after_the_end_is_refused_before_any_is_injected(
    tmp_path: Path, log: str, at: int, after_s: float | None, said: str
) -> None:
    paths = RunPaths(tmp_path)
    paths.log.write_text(log)
    command = Command(words=("a",), at=at, after_s=after_s, minutes=10)
    with pytest.raises(UsageError, match=said.replace("(", "[(]")):
        command.check_reference(paths, took_s=29.6)
    paths.log.write_text(printed(0, range(1, 9)))
    assert command.check_reference(paths, took_s=31) == 0


def test_a_run_without_a_fault_that_takes_too_long_is_one_line(tmp_path: Path) -> None:
    place = FakePlace(range(0), {})
    place.paths = RunPaths(tmp_path / "reference")
    run = FaultRun(
        fault=FAULTS["term"], place=place, paths=place.paths, program=PROGRAM, mark="m",
        patience_s=0.01, say=print, halted=threading.Event(),
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"end: not reached within 0\.01 s; give a longer --pat"):
        run.run_reference()
    assert run.started.over, "it was ended"


@pytest.mark.parametrize(
    ("after_s", "took_s", "minutes"),
    [(20.0, 200.0, 2), (150.0, 300.0, 4), (None, 440.0, 6), (150.0, 200.0, None)],
)
def test_a_time_limit_comes_after_the_injection_point(
    tmp_path: Path, after_s: float | None, took_s: float, minutes: int | None
) -> None:
    paths = RunPaths(tmp_path)
    paths.log.write_text(printed(0, range(1, 9)))  # step 5 of 8
    command = Command(words=("a",), at=5, after_s=after_s, minutes=10)
    assert command.limited(FAULTS["term"], paths, 1.0) is FAULTS["term"]
    if minutes is None:
        with pytest.raises(UsageError, match=r"200 s; .* after 150 s it must run for at least 5"):
            command.limited(FAULTS["time-limit"], paths, took_s)
        return
    fault = command.limited(FAULTS["time-limit"], paths, took_s)
    assert fault.options["time"] == str(minutes)
    run = FaultRun(
        fault=fault, place=LocalPlace(), paths=paths, program=command,
        mark="m", say=print, halted=threading.Event(),
    )  # fmt: skip
    run.starts.append(Started(begins=[1000.0]))
    assert fault.inject is not None
    fault.inject(run)
    assert run.injected_at == 1000 + 60 * minutes


def test_the_time_in_a_queue_is_not_the_commands() -> None:
    assert Started().took_s == 0.0
    assert Started(begins=[1000.0, 1100.0], ends=[1003.0, 1140.0]).took_s == 40.0
    assert Started(begins=[1000.0, 1100.0], ends=[1003.0]).took_s == 3.0


def test_one_rank_is_signalled_and_not_the_shell_that_starts_it() -> None:
    """Ranks 0 and 1, a process without a rank, and a shell with the words of rank 1's shell."""
    wait, started = [sys.executable, "-c", "input()"], []
    for rank, words in ((0, wait), (1, wait), (None, wait), (1, [*wait, "rank_run here"])):
        env = {**os.environ, MARK: "one-rank"} | ({} if rank is None else {"RANK": str(rank)})
        started.append(subprocess.Popen(words, env=env, stdin=subprocess.PIPE))
    try:
        assert signal_ranks("one-rank", signal.SIGKILL, rank=1) == 1
        assert started[1].wait(300) == -9
        assert signal_ranks("one-rank", signal.SIGTERM) == 1
        assert started[0].wait(300) == -15
        assert signal_ranks("one-rank", 0) == 0
        assert [p.poll() for p in started[2:]] == [None, None]
    finally:
        end_marked("one-rank")
    for process in started[2:]:
        assert process.wait(300) == -9
