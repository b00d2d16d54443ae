"""Runs a program under faults: start, injection, restarts, and the row of each result."""

import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from jobkit.drill.faults import REFERENCE, TIME_LIMIT_MIN, FaultCase, Row, first_state
from jobkit.drill.places import MARK, Place, SlurmPlace, Start, end_marked, signal_marked
from jobkit.drill.programs import Program, began
from jobkit.errors import UsageError
from jobkit.launch.slurm_options import Options
from jobkit.outcome.state import merged, run_state
from jobkit.paths import RunPaths, StudyPaths

PATIENCE_S = 400.0  # for one thing that must happen, where nothing else was said
STARTS = 3  # at most; a run that has not recovered by then is lost
AT_ONCE = 3  # runs on Slurm; most of their time they wait
_LINGER_S = 60.0  # for processes to end after their run


def impossible(place: Place, program: Program, fault: FaultCase) -> str:
    """Return why a fault cannot be injected at a place; empty if it can."""
    match fault.name:
        case "raise" if program.words:
            return "only jobkit's own training does this to itself"
        case "scancel" | "time-limit" | "preemption" if not isinstance(place, SlurmPlace):
            return "it needs Slurm"
        case "preemption" if not place.urgent:
            return "no partition whose jobs preempt others: name one with --urgent-partition"
        case "kill" | "hang" if program.words and not place.sees_processes:
            return "it signals one rank on its node: needs --local or --minicluster"
        case "time-limit" if program.words:
            return "only jobkit's own training is known to run for so long: try scancel"
    return ""


@dataclass(kw_only=True)
class Drill:
    place: Place
    study: StudyPaths
    program: Program
    patience_s: float
    say: Callable[[str], None]
    halted: threading.Event  # by a signal to the drill
    token: str = field(default_factory=lambda: secrets.token_hex(6))

    def run(self, faults: Sequence[FaultCase]) -> list[Row]:
        """Run the reference, then a run for each fault; return their rows, in order.

        What an earlier drill left is removed, unless no fault can be injected (UsageError).
        """
        whys = {f.name: impossible(self.place, self.program, f) for f in faults}
        if all(whys.values()):
            reasons = "; ".join(f"{name}: {why}" for name, why in whys.items())
            raise UsageError(f"no fault can be injected here: {reasons}")
        if self.study.folder.exists():
            shutil.rmtree(self.study.folder)
        self.say("reference: the run without a fault, as the reference")
        reference = FaultRun(self, REFERENCE)
        self.program = replace(self.program, after_s=reference.run_reference() / 2)
        # Off Slurm the ranks of two runs would share the cores.
        with ThreadPoolExecutor(AT_ONCE if isinstance(self.place, SlurmPlace) else 1) as pool:
            rows = list(pool.map(lambda fault: self._one(fault, whys[fault.name]), faults))
        return self.program.compared(rows, reference.paths.folder)

    def _one(self, fault: FaultCase, why_not: str) -> Row:
        if why_not:
            return Row(fault=fault.name, note=f"not possible here: {why_not}")
        row = FaultRun(self, fault).run()
        note = f" ({row.note})" if row.note else ""
        self.say(f"{fault.name}: {row.first_status}, then {row.final_status}{note}")
        return row


class FaultRun:
    """A run of the program under one fault."""

    def __init__(self, drill: Drill, fault: FaultCase) -> None:
        self.drill, self.fault, self.program = drill, fault, drill.program
        self.paths = RunPaths(drill.study.folder.absolute() / fault.name)
        self.mark = f"{drill.token}-{fault.name}"  # in the environment of all its processes
        self.injected_at = 0.0
        self.starts = list[Start]()

    @property
    def started(self) -> Start:
        return self.starts[-1]

    def run(self) -> Row:
        """Start the run, inject the fault, restart the run until it is ok; return its row."""
        notes, left = list[str](), None
        for act in (self._until_recovered, self._cancel_what_runs):
            try:
                act()
            except (UsageError, OSError, KeyboardInterrupt) as wrong:
                notes.append(str(wrong))  # so that one fault does not end the runs of others
        if self.drill.place.sees_processes:
            left = end_marked(self.mark, _LINGER_S)
        return self._judge("; ".join(notes), left)

    def run_reference(self) -> float:
        """Run the program without a fault; return its seconds.

        Raises UsageError where it fails, or takes longer than patience_s.
        """
        self._start({})
        try:
            self._wait_for_end()
        except UsageError as lost:
            raise UsageError(
                f"the run without a fault: {lost}; give a longer --patience, or a shorter run"
            ) from None
        finally:
            self._cancel_what_runs()
        row = self._judge("", None)
        if row.final_status != "ok":
            why = f" ({row.evidence})" if row.evidence else ""
            raise UsageError(f"the run without a fault failed{why}: see {self.paths.log}")
        return self.started.took_s

    def _start(self, options: Options) -> None:
        self._check_halted()
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        place, program = self.drill.place, self.program
        env = {MARK: self.mark, **program.environment(self.fault)}
        options = {"time": str(program.minutes), **options}
        spec = program.spec(place.size, self.fault)
        self.starts.append(place.start(spec, self.paths, env, options))

    def _until_recovered(self) -> None:
        fault, program = self.fault, self.program
        self._start(fault.options)
        there = partial(program.reached, self.paths, self.started)
        self._wait("the injection point", lambda: there() or not self.started.look())
        if not there() or (not program.does_itself(fault) and not self.started.look()):
            raise UsageError(f"the run {self.started.end_text} before the fault")
        self.inject()
        self.drill.say(f"{fault.name}: injected after {program.where()}")
        self._wait_for_end()
        while run_state(self.paths).status != "ok":
            if len(self.starts) == STARTS:
                raise UsageError(f"not ok after {STARTS} starts")
            self.drill.say(f"{fault.name}: {self.started.end_text}; restarting the run")
            self._start({})
            self._wait_for_end()

    def inject(self) -> None:
        """Inject the fault, if the program has not done it itself."""
        self.injected_at = time.time()
        if self.program.does_itself(self.fault):
            self.injected_at = self.paths.fault_marker(0).stat().st_mtime
            return
        match self.fault.name:
            case "warning":
                self.started.warn()
            case "term":
                self.started.terminate_ranks(self.mark)
            case "scancel":
                self.started.cancel()
            case "time-limit":  # Slurm injects it
                self.injected_at = self.started.begins[0] + 60 * TIME_LIMIT_MIN
            case "preemption":
                assert isinstance(self.drill.place, SlurmPlace)
                self.drill.place.preempt(self.started.nodes)
            case name:  # kill or hang, of a command
                number = signal.SIGKILL if name == "kill" else signal.SIGSTOP
                hit = partial(signal_marked, self.mark, number, ["1"])
                self._wait("a process of rank 1", lambda: hit() > 0)

    def _wait_for_end(self) -> None:
        self._wait("the run's end", lambda: not self.started.look())

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Raises UsageError after patience_s, KeyboardInterrupt where the drill was halted."""
        deadline = time.monotonic() + self.drill.patience_s
        while not condition():
            self._check_halted()
            if time.monotonic() > deadline:
                raise UsageError(f"{what}: not reached within {self.drill.patience_s:g} s")
            time.sleep(self.drill.place.poll_s)

    def _check_halted(self) -> None:
        if self.drill.halted.is_set():
            raise KeyboardInterrupt("the drill was interrupted")

    def _cancel_what_runs(self) -> None:
        for started in self.starts:
            if not started.over:
                started.cancel()
                started.look()

    def _judge(self, note: str, left: int | None) -> Row:
        begins = [at for started in self.starts for at in started.begins]
        ends = [at for started in self.starts for at in started.ends]
        numbers = self.paths.attempt_numbers()
        first = first_state(self.paths, ends[0] if ends else None)
        if self.starts:
            first = merged(first, self.starts[0].accounted())
        again = len(begins) > 1
        restart = began(self.paths, numbers[1]) if again and numbers[1:] else None
        return Row(
            fault=self.fault.name,
            where=",".join(self.starts[0].nodes if self.starts else []) or self.drill.place.name,
            first_status=first.status,
            evidence=first.evidence or first.reason,
            final_status=run_state(self.paths).status,
            attempts=len(numbers),
            detected_s=ends[0] - self.injected_at if again and ends and self.injected_at else None,
            restart_s=restart - begins[1] if restart else None,
            iterations_lost=self.program.redone(self.paths),
            orphans=left,
            note=note or self.program.deviation(self.fault, first.status),
        )
