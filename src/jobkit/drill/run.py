"""Runs a training under faults: start, injection, restarts, and the row of each result."""

import contextlib
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobkit.drill.faults import FaultCase, Row, first_attempt
from jobkit.drill.places import (
    MARK,
    LocalPlace,
    SlurmPlace,
    SlurmStart,
    Started,
    end_marked,
    first_row,
    none_left,
    signal_ranks,
)
from jobkit.drill.programs import Command, Training
from jobkit.errors import UsageError
from jobkit.launch.slurm_options import Options
from jobkit.outcome.state import RunState, merged, run_state
from jobkit.paths import RunPaths, StudyPaths

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_S = 400.0  # for one thing that must happen, where nothing else was said
STARTS = 3  # at most; a run that has not recovered by then is lost
_LINGER_S = 60.0  # for processes to end after their run


class Lost(Exception):
    """The run did not recover, or could not be tested; the text says why."""


class Halted(Exception):
    """The drill was interrupted."""


@contextlib.contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Append errors to the notes, so that one fault does not end the runs of others."""
    try:
        yield
    except (Lost, UsageError, OSError) as wrong:
        notes.append(str(wrong))


@dataclass(kw_only=True)
class FaultRun:
    """A run under one fault."""

    fault: FaultCase
    place: LocalPlace | SlurmPlace
    paths: RunPaths
    program: Training | Command
    mark: str  # in the environment of all its processes
    patience_s: float = PATIENCE_S
    say: Callable[[str], None]
    halted: threading.Event
    injected_at: float = 0.0
    starts: list[Started] = field(default_factory=list)

    @property
    def started(self) -> Started:
        """The latest start of the run."""
        return self.starts[-1]

    def inject(self) -> None:
        """Inject the fault from outside."""
        self.injected_at = time.time()
        match self.fault.action:
            case "warn":
                self.place.warn(self.started)
            case "term":
                self.place.terminate_ranks(self.started, self.mark)
            case "cancel":
                self.started.cancel()
            case "limit":  # Slurm injects it
                minutes = int(str(self.fault.options["time"]))
                self.injected_at = self.started.begins[0] + 60 * minutes
            case "preempt":
                assert isinstance(self.place, SlurmPlace)
                refused = self.place.preempt(self.nodes())
                self.check(not refused, f"the preempting job was refused: {refused}")
            case "kill" | "hang":  # of a command; jobkit's training does it to itself
                number = signal.SIGKILL if self.fault.action == "kill" else signal.SIGSTOP
                self.wait(
                    "a process of rank 1", lambda: signal_ranks(self.mark, number, rank=1) > 0
                )

    def nodes(self) -> list[str]:
        """The nodes of the first start."""
        first = self.starts[0] if self.starts else None
        return first.nodes if isinstance(first, SlurmStart) else []

    def check(self, good: bool, else_: str) -> None:
        """Raise Lost with this text unless good."""
        if not good:
            raise Lost(else_)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. Raises Lost after patience_s, Halted on an interrupt."""
        deadline = time.monotonic() + self.patience_s
        while not condition():
            if self.halted.is_set():
                raise Halted
            self.check(
                time.monotonic() < deadline, f"{what}: not reached within {self.patience_s:g} s"
            )
            time.sleep(self.place.poll_s)

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> Row:
        """Start the run, inject the fault, restart the run until it is ok; return its row."""
        notes: list[str] = []
        try:
            with noting(notes):
                self._first_start()
                self._until_done()
        finally:
            with noting(notes):
                self._cancel_what_runs()
            left = none_left(self.mark, _LINGER_S) if self.place.sees_processes else None
            end_marked(self.mark)
        return self._judge("; ".join(notes), left)

    def run_reference(self) -> Row:
        """Run the training without a fault; return its row.

        Raises UsageError where it takes longer than patience_s.
        """
        self.paths.folder.mkdir(parents=True)
        self._start({}, False)
        try:
            self._wait_for_end()
        except Lost as lost:
            raise UsageError(
                f"the run without a fault: {lost}; give a longer --patience, or a shorter run"
            ) from None
        finally:
            self._cancel_what_runs()
        return self._judge("", None)

    def _first_start(self) -> None:
        fault = self.fault
        self.paths.folder.mkdir(parents=True)
        self._start(fault.options, self.place.name == "here")

        def there() -> bool:
            return self.program.reached(self.paths, self.started)

        self.wait("the injection point", lambda: there() or not self.started.look())
        too_late = fault.action and not self.started.look()
        self.check(there() and not too_late, f"the run {self.started.end_text} before the fault")
        if fault.action:
            self.inject()
        else:  # the program did it
            self.injected_at = self.paths.fault_marker(0).stat().st_mtime
        self.say(f"{fault.name}: injected {self.program.where()}")

    def _start(self, options: Options, again: bool) -> None:
        env = {MARK: self.mark, **self.program.environment(self.fault)}
        spec = self.program.spec(self.place.size, self.fault)
        more = {**self.program.options(), **options}
        self.starts.append(self.place.start(spec, self.paths, env, again, more))

    def _until_done(self) -> None:
        while True:
            self._wait_for_end()
            if run_state(self.paths).status == "ok":
                return
            self.check(len(self.starts) < STARTS, f"not ok after {STARTS} starts")
            self.check(not self.halted.is_set(), "ended")
            self.say(f"{self.fault.name}: {self.started.end_text}; restarting the run")
            self._start({}, False)

    def _wait_for_end(self) -> None:
        self.wait("the run's end", lambda: not self.started.look())

    def _cancel_what_runs(self) -> None:
        for started in self.starts:
            if not started.over:
                started.cancel()
                started.look()

    # --- the result -----------------------------------------------------------------------------

    def _judge(self, note: str, left: int | None) -> Row:
        begins = [at for started in self.starts for at in started.begins]
        ends = [at for started in self.starts for at in started.ends]
        numbers = self.paths.attempt_numbers()
        first = self._first_state()
        final = run_state(self.paths)
        again = len(begins) > 1
        restart = self.program.began(self.paths, numbers[1]) if again and numbers[1:] else None
        return Row(
            fault=self.fault.name,
            where=",".join(self.nodes()) or self.place.name,
            first_status=first.status,
            evidence=first.evidence or first.reason,
            final_status=final.status,
            attempts=len(numbers),
            detected_s=ends[0] - self.injected_at if again and ends and self.injected_at else None,
            restart_s=restart - begins[1] if restart else None,
            iterations_lost=self.program.redone(self.paths) if numbers else None,
            orphans=left,
            note=note or self.program.deviation(self.fault, first.status),
        )

    def _first_state(self) -> RunState:
        """Return the state of the first attempt as it was at its end."""
        first = self.starts[0] if self.starts else None
        early = first_attempt(self.paths, first.ends[0] if first and first.ends else None)
        state = run_state(early)
        shutil.rmtree(early.folder.parent)
        row = first_row(first.job_id) if isinstance(first, SlurmStart) else None
        return merged(state, row)


REFERENCE = "reference"
AT_ONCE = 3  # runs on Slurm; most of their time they wait


def check_any(whys: Mapping[str, str]) -> None:
    """Raise UsageError where no fault can be injected. whys: by fault why not, or empty."""
    if all(whys.values()):
        reasons = "; ".join(f"{name}: {why}" for name, why in whys.items())
        raise UsageError(f"no fault can be injected here: {reasons}")


def impossible(place: LocalPlace | SlurmPlace, fault: FaultCase) -> str:
    """Return why a fault cannot be injected at a place; empty if it can."""
    if place.name not in fault.where:
        return "it needs Slurm"
    if fault.needs == "urgent" and not (isinstance(place, SlurmPlace) and place.urgent):
        return "no partition whose jobs preempt others: name one with --urgent-partition"
    if fault.needs == "processes" and not place.sees_processes:
        return "it signals one rank on its node: needs --local or --minicluster"
    return ""


class Drill:
    """The runs of a drill."""

    def __init__(
        self,
        place: LocalPlace | SlurmPlace,
        study: StudyPaths,
        program: Training | Command,
        patience_s: float,
        console: "Console",
        halted: threading.Event,
    ) -> None:
        self.place, self.study, self.console = place, study, console
        self.program, self.patience_s, self.halted = program, patience_s, halted
        self.token = secrets.token_hex(6)

    def check(self, faults: Sequence[FaultCase]) -> dict[str, str]:
        """Why each fault cannot be injected here, "" if it can; UsageError where none can."""
        why = self.program.impossible
        whys = {fault.name: why(fault) or impossible(self.place, fault) for fault in faults}
        check_any(whys)
        return whys

    def run(self, faults: Sequence[FaultCase]) -> list[Row]:
        """Run the reference, then a run for each fault; return their rows, in order."""
        whys = self.check(faults)
        self.console.print(f"{REFERENCE}: the run without a fault, as the reference")
        reference = self._reference()
        todo = []
        for fault in faults:
            try:
                if not whys[fault.name]:
                    took_s = reference.started.took_s
                    todo.append(self.program.limited(fault, reference.paths, took_s))
            except UsageError as error:
                whys[fault.name] = str(error)
        check_any(whys)
        # Off Slurm the ranks of two runs would share the cores.
        with ThreadPoolExecutor(AT_ONCE if self.place.name == "slurm" else 1) as pool:
            futures = {fault.name: pool.submit(self._one, fault) for fault in todo}
        rows = [
            Row(fault=fault.name, note=f"not possible here: {whys[fault.name]}")
            if whys[fault.name]
            else futures[fault.name].result()
            for fault in faults
        ]
        return self.program.compared(rows, self.study.folder / REFERENCE)

    def _reference(self) -> FaultRun:
        plain = FaultCase(name=REFERENCE, text="", first=("ok",), kind="")
        reference = self._fault_run(plain)
        row = reference.run_reference()
        if row.final_status != "ok":
            why = f" ({row.evidence})" if row.evidence else ""
            raise UsageError(f"the run without a fault failed{why}: see {reference.paths.log}")
        self.program.check_reference(reference.paths, reference.started.took_s)
        return reference

    def _one(self, fault: FaultCase) -> Row:
        if self.halted.is_set():
            return Row(fault=fault.name, note="not injected: the drill was interrupted")
        try:
            row = self._fault_run(fault).run()
        except Halted:
            return Row(fault=fault.name, note="the drill was interrupted")
        self.console.print(
            f"{fault.name}: {row.first_status}, then {row.final_status}"
            + (f" ({row.note})" if row.note else ""),
            soft_wrap=True,
        )
        return row

    def _fault_run(self, fault: FaultCase) -> FaultRun:
        return FaultRun(
            fault=fault,
            place=self.place,
            paths=RunPaths(self.study.folder.absolute() / fault.name),
            program=self.program,
            mark=f"{self.token}-{fault.name}",
            patience_s=self.patience_s,
            say=lambda text: self.console.print(text, soft_wrap=True),
            halted=self.halted,
        )
