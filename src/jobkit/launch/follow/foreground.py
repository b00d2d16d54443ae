"""A launch in the foreground: what it prints, and what a signal does to it."""

import signal
from collections import Counter
from collections.abc import Mapping

from rich.console import Console

from jobkit.errors import Exit
from jobkit.launch.command import shown
from jobkit.launch.follow.view import View
from jobkit.launch.launcher import Launch
from jobkit.outcome.state import RunState
from jobkit.paths import short_path

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Foreground:
    """Prints a launch, from its notes to its results, on a console."""

    def __init__(self, started: Launch) -> None:
        self.started, self.name = started, started.plan.study.name
        self.console = Console(highlight=False, markup=False)

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, soft_wrap=True)

    def announce(self) -> None:
        """Print the notes, how many runs start, and where."""
        started = self.started
        for note in (*started.plan.notes, *started.notes):
            self._print(f"note: {note}", "yellow")
        total, new = len(started.plan.runs), len(started.run_ids)
        now = Counter(s.status for r, s in started.states().items() if r not in started.run_ids)
        before = "".join(f", {n} {status} already" for status, n in now.items())
        todo = f"{new} to start" if new else "none to start"
        if new and started.at_once:
            todo += f", {started.at_once} at a time"
        folder = short_path(started.folder)
        planned = f"{total} run{'s' * (total != 1)} planned{before}"
        self._print(f"study {self.name}: {planned}, {todo}, in {folder}")
        if started.runs:
            self._print(f"started: {started.runs.where}")

    def next_steps(self) -> int:
        """Print how to follow and how to cancel runs that continue; return the exit code."""
        name = self.name
        self._print(
            f"next: python -m jobkit status {name} --watch | python -m jobkit cancel {name}"
        )
        return Exit.INCOMPLETE if self._say_left() else Exit.OK

    def _say_left(self) -> bool:
        """Print how to submit the runs that Slurm has not taken; return whether there are any."""
        if left := self.started.left:
            self._print(
                f"then: the same command again, which submits the other {len(left):,} runs",
                "yellow",
            )
        return bool(left)

    def follow(self) -> int:
        """Show the study until it has ended; return the exit code.

        SIGINT, SIGTERM and SIGHUP end the runs of this machine; jobs on Slurm continue.
        """
        for signum in _SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(signum, _interrupt)
        try:
            found = View(self.started, self.console).follow()
        except Interrupted as interrupted:
            for signum in _SIGNALS:
                signal.signal(signum, signal.SIG_IGN)  # a second one must not leave orphans
            return self._stop(interrupted.signum)
        return self.conclude(found)

    def _stop(self, signum: int) -> int:
        code = Exit.INTERRUPTED if signum == signal.SIGINT else Exit.TERMINATED
        if self.started.site is not None:
            self._print(f"the jobs continue; to end them: python -m jobkit cancel {self.name}")
            self._say_left()
            return code
        self._print("stopping: ending the active runs ...", "yellow")
        self.started.cancel()
        self._print_runs(self.started.states())
        return code

    def conclude(self, found: Mapping[str, RunState]) -> int:
        """Print the outcome of the runs and the next command; return the exit code."""
        ok = self._print_runs(found)
        self._print(f"next: ./plot_results.sh {shown([short_path(self.started.folder)])}")
        return Exit.OK if ok else Exit.FAILED

    def _print_runs(self, found: Mapping[str, RunState]) -> bool:
        """Print the runs that are not ok, with their logs; return whether all are ok."""
        bad = {run_id: state for run_id, state in found.items() if state.status != "ok"}
        if not bad:
            self._print(f"all {len(found)} runs are ok", "green")
            return True
        self._print(f"{len(found) - len(bad)} of {len(found)} runs are ok; not ok:")
        for run_id, state in bad.items():
            if state.status != "missing":
                self._print(f"  {run_id}: {state.status}: {state.reason}", "red")
                self._print(f"    log: {short_path(self.started.plan.paths.run(run_id).log)}")
        if never := sum(state.status == "missing" for state in bad.values()):
            self._print(f"  {never} never started", "red")
        self._print("to continue, run the same command again: only these are started")
        return False


def _interrupt(signum: int, _frame: object) -> None:
    raise Interrupted(signum)
