"""The table of a study's runs, and what a launch in the foreground prints."""

import re
import shlex
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobkit.errors import Exit
from jobkit.launch.launcher import Launch, pause_s
from jobkit.launch.states import Progress, States, counted, duration, progress
from jobkit.outcome.state import FINAL, RunState, read_job
from jobkit.paths import short_path

_RECENT = 8  # ended runs that the live table still shows
_POLL_S = 0.4
_COLOURS = {"ok": "green", "running": "cyan", "pending": "dim", "cancelled": "yellow"}
# Runs that end so in their first minute would end so at any size: what they were given is wrong.
_BAD_INPUT = re.compile(r"No such file|not found|cannot be downloaded|ModuleNotFound|ImportError")
_ALIKE, _EARLY_S = 3, 60.0
_MAX_REASON = 100  # characters of a reason in a line for one run
_MAX_NAMED = 3  # runs named where several ended for the same reason
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def study_view(
    looks: States, listed: Sequence[Mapping[str, Any]], console: Console
) -> RenderableType:
    """The table or, on a terminal too narrow for it, a few lines for each run, none cut."""
    total = len(looks.plan.runs)
    counts = Counter(state.status for state in looks.of_runs.values())
    summary = ", ".join(f"{n} {status}" for status, n in counts.items())
    title = f"{looks.plan.study.name}: {counted(total, 'run')}: {summary}"
    more, manifests = "", looks.plan.paths.folder / "kubernetes"
    if total > len(listed):
        more = f"{total - len(listed):,} of {total:,} runs are not listed here; --json has all"
    elif counts["missing"] == total and manifests.is_dir():
        more = f"next: kubectl apply -f {short_path(manifests)}/"
    result = table(listed, title)
    room = console.options.update(width=10_000)  # else the answer is never above the width
    if console.measure(result, options=room).minimum <= console.width:
        return Group(result, Text(more, overflow="fold")) if more else result
    lines = [title]
    for row in listed:
        cells = [
            f"{text} {name}" if name.endswith((")", "left")) else f"{name} {text}"
            for name, text in _cells(row).items()
            if text
        ]
        words = filter(None, (row["status"], *cells, _reason(row)))
        lines += [row["run_id"], "  " + ", ".join(words)]
    return Text("\n".join([*lines, *filter(None, [more])]), overflow="fold")


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """What the table says of a run's progress, by column; empty where nothing is known."""
    loss, rate = row["val_loss"], row["rate"]
    what = "median epoch" if row["epoch"] else "mean step"
    return {
        "epoch": f"{row['epoch']}/{row['epochs']}" if row["epochs"] else "",
        "step": f"{row['step']:,.0f}" if row["step"] is not None and not row["epochs"] else "",
        "loss": "" if loss is None else f"{loss:.3f}",
        f"{row['unit']}/s ({what})": "" if rate is None else f"{rate:,.0f}",
        "time": duration(row["elapsed_s"]),
        "left": duration(row["left_s"]),
        "load": row["load"],
    }


def _reason(row: Mapping[str, Any]) -> str:
    """Why a run waits or failed; empty where there is nothing to do."""
    return "" if row["status"] in ("ok", "running") else str(row["reason"])


def _cut(reason: str) -> str:
    """A reason that leaves room on its line; the whole stands at the end and in the log."""
    return reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 4]} ..."


def table(listed: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """The runs with the columns in which a run has something; the headings say what each is."""
    result = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    cells = [_cells(row) for row in listed]
    names = [name for row in cells for name, text in row.items() if text]
    order = ["epoch", "step", "loss", *(n for n in names if "/s (" in n), "time", "left", "load"]
    columns = [name for name in dict.fromkeys(order) if name in names]
    reasons = ["reason"] if any(_reason(row) for row in listed) else []
    for heading in ("run", "status", *columns, *reasons):
        result.add_column(
            heading,
            justify="left" if heading in ("run", "status", "load", "reason") else "right",
            no_wrap=heading != "reason" and "/s (" not in heading,
            overflow="fold",
        )
    above = ""
    for row, texts in zip(listed, cells, strict=True):
        reason, above = "as above" if _reason(row) == above != "" else _reason(row), _reason(row)
        result.add_row(
            row["run_id"],
            Text(row["status"], style=_COLOURS.get(row["status"], "red")),
            *(texts.get(name, "") for name in columns),
            *(reason for _ in reasons),
        )
    return result


# --- a launch in the foreground ---------------------------------------------------------------


class Interrupted(BaseException):
    """A signal asked to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def _interrupt(signum: int, _frame: object) -> None:
    raise Interrupted(signum)


class Foreground:
    """Prints a launch, from its notes to its results, on a console."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.name = launch, launch.plan.study.name
        self.console = Console(highlight=False, markup=False)
        self.states: dict[str, RunState] = {}
        self.progress: dict[str, Progress] = {}
        self._begun, self._notes = time.monotonic(), 0
        self._printed: dict[str, tuple[str, int]] = {}

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, soft_wrap=True)

    def announce(self) -> None:
        """Print how many runs will start, where, and what they may cost."""
        launch, new = self.launch, len(self.launch.run_ids)
        states = launch.looks.of_runs.items()
        other = Counter(state.status for r, state in states if r not in launch.run_ids)
        planned = f"study {self.name}: {counted(len(launch.plan.runs), 'run')} planned"
        before = "".join(f", {n} {status} already" for status, n in other.items())
        at_once = f", {launch.at_once} at a time" if new and launch.at_once else ""
        todo = f"{new or 'none'} to start{at_once}"
        self._print(f"{planned}{before}, {todo}, in {short_path(launch.folder)}")
        if new and launch.site is None:  # on Slurm a note says the node-hours
            specs = [launch.plan.runs[run_id] for run_id in launch.run_ids]
            sizes = " ".join(map(str, sorted({spec.world_size for spec in specs})))
            first = "epoch" if any(spec.planned_epochs for spec in specs) else "run"
            self._print(f"sizes: {sizes}; how long it takes is known after the first {first}")
        self._print_notes([*launch.plan.notes, *launch.notes])
        self._notes = len(launch.notes)

    def started(self) -> None:
        """Print where the runs were started, and what was noted since they were announced."""
        self._print_notes(self.launch.notes[self._notes :])
        if self.launch.runs:
            self._print(f"started: {self.launch.runs.where}")

    def _print_notes(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._print(f"note: {note}", "yellow")

    def next_steps(self) -> int:
        """Print how to follow and how to cancel runs that continue; return the exit code."""
        name = self.name
        self._print(
            f"next: python -m jobkit status {name} --watch | python -m jobkit cancel {name}"
        )
        return Exit.INCOMPLETE if self._print_left() else Exit.OK

    def _print_left(self) -> bool:
        """Print how to submit the runs that Slurm has not taken; return whether there are any."""
        if left := self.launch.left:
            runs = counted(len(left), "run")
            self._print(f"then: the same command again, which submits the other {runs}", "yellow")
        return bool(left)

    def follow(self) -> int:
        """Show the study until it has ended; return the exit code.

        SIGINT, SIGTERM and SIGHUP end the runs of this machine; jobs on Slurm continue.
        """
        for signum in _SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(signum, _interrupt)
        try:
            self.watch()
        except Interrupted as interrupted:
            for signum in _SIGNALS:
                signal.signal(signum, signal.SIG_IGN)  # a second one must not leave orphans
            return self._stop(interrupted.signum)
        return self.conclude()

    def _stop(self, signum: int) -> int:
        code = Exit.INTERRUPTED if signum == signal.SIGINT else Exit.TERMINATED
        if self.launch.site is not None:
            self._print(f"the jobs continue; to end them: python -m jobkit cancel {self.name}")
            self._print_left()
            return code
        self._print("stopping: ending the active runs ...", "yellow")
        self.launch.cancel()
        self._print_runs(self.launch.states())
        return code

    def watch(self) -> None:
        """Show the runs until all have ended: a live table, or one line for each change."""
        if self.console.is_terminal:
            with Live(console=self.console, refresh_per_second=4, transient=True) as live:
                while self._look_and_pause():
                    live.update(self._live())
        else:
            while self._look_and_pause():
                pass
        self._print_events()

    def _look_and_pause(self) -> bool:
        """Read the states of all runs; return whether one still waits or runs."""
        begin = time.monotonic()
        active = self.launch.running()
        before, self.states = self.states, self.launch.states()
        for run_id in self.launch.run_ids:
            status = self.states[run_id].status
            ended = run_id in before and before[run_id].status in FINAL
            if status == "running" or (status in FINAL and not ended):
                paths, spec = self.launch.plan.paths.run(run_id), self.launch.plan.runs[run_id]
                self.progress[run_id] = progress(paths, spec, self.states[run_id].attempt)
        if not self.console.is_terminal:
            self._print_events()
        if active and (runs := self._bad_input()):
            self.launch.cancel()
            self.states, left = self.launch.states(), len(self.launch.run_ids) - runs
            why = f"stopped: {runs} runs failed for the same reason, and {left} would too"
            self._print(f"{why}; mend it and run the same command again", "red")
            return False
        if active:
            time.sleep(pause_s(time.monotonic() - begin, _POLL_S))
        return active

    def _bad_input(self) -> int:
        """How many runs failed early, all for one reason that lies in their input; else 0."""
        states = {run_id: self.states[run_id] for run_id in self.launch.run_ids}
        ended = {run_id: state for run_id, state in states.items() if state.status in FINAL}
        if self.launch.site is not None or len(ended) < _ALIKE:
            return 0
        alike = len({(state.status, state.reason) for state in ended.values()}) == 1
        bad = all(
            state.status == "failed"
            and (state.exit_code == Exit.USAGE or _BAD_INPUT.search(state.reason))
            and (self.progress[run_id].elapsed_s or 0.0) < _EARLY_S
            for run_id, state in ended.items()
        )
        return len(ended) if alike and bad else 0

    def _print_events(self) -> None:
        """Print one line for each change since the last update: a start, an epoch, an end."""
        for number, run_id in enumerate(self.launch.run_ids, 1):
            state, at = self.states[run_id], self.progress.get(run_id)
            now = (state.status, at.epoch if at else 0)
            if state.status not in ("running", *FINAL) or self._printed.get(run_id) == now:
                continue
            self._printed[run_id] = now
            took = f" in {duration(at.elapsed_s)}" if at and at.elapsed_s is not None else ""
            if state.status == "running":
                text = at.text if at and at.text else "started"
            elif state.status == "ok":
                text = f"ok{took}{', ' + at.text if at and at.text else ''}"
            else:
                text = f"{state.status}{took}: {_cut(state.reason)}"
            line = f"[{number}/{len(self.launch.run_ids)}] {run_id}: {text}"
            self._print(line, _COLOURS.get(state.status, "red"))

    def _live(self) -> RenderableType:
        """The runs at work, the last ones that ended, a bar, and the time left."""
        run_ids, states = self.launch.run_ids, self.states
        ended = [r for r in run_ids if states[r].status in FINAL][-_RECENT:]
        running = [r for r in run_ids if states[r].status == "running"]
        looks = self.launch.looks
        listed = [looks.row(run_id, self.progress.get(run_id)) for run_id in ended + running]
        counts = Counter(states[r].status for r in run_ids)
        done = sum(counts[status] for status in FINAL)
        at_work = (self.progress[r] for r in running if r in self.progress)
        part = sum(at.epoch / at.epochs for at in at_work if at.epochs)
        summary = ", ".join(f"{n} {status}" for status, n in counts.items())
        times = f"{duration(time.monotonic() - self._begun)} elapsed"
        if (left := self.left_s()) is not None:
            times += f", about {duration(left)} left"
        grid = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=len(run_ids), completed=done + part, width=30)
        grid.add_row(bar, f"{done}/{len(run_ids)} runs", Text(summary, style="dim"), times)
        return Group(table(listed), Text(""), grid)

    def left_s(self) -> float | None:
        """Estimated seconds until all runs have ended; None before the first epoch has."""
        status = {run_id: self.states[run_id].status for run_id in self.launch.run_ids}
        ok = [at.elapsed_s for r, at in self.progress.items() if status[r] == "ok"]
        running = [at for r, at in self.progress.items() if status[r] == "running"]
        whole = [
            at.elapsed_s + at.left_s
            for at in running
            if at.left_s is not None and at.elapsed_s is not None
        ]
        took = [seconds for seconds in ok if seconds is not None] or whole
        if not took:
            return None
        usual = statistics.median(took)
        waiting = sum(name in ("pending", "missing") for name in status.values())
        left = sum(
            at.left_s if at.left_s is not None else max(0.0, usual - (at.elapsed_s or 0.0))
            for at in running
        )
        return (left + waiting * usual) / (self.launch.at_once or max(1, len(running)))

    # --- the end ------------------------------------------------------------------------------

    def conclude(self) -> int:
        """Print what became of the runs, where their files are, and the next command."""
        states = self.launch.states()
        any_ok = any(state.status == "ok" for state in states.values())
        all_ok = self._print_runs(states)
        self._print_rates()
        folder = short_path(self.launch.folder)
        self._print(f"files: {folder}: a folder for each run, with its log and its records")
        if any_ok:
            self._print(
                f"next: ./plot_results.sh {shlex.quote(folder)}    (tables, figures, report)"
            )
        return Exit.OK if all_ok else Exit.FAILED

    def _print_rates(self) -> None:
        """Print the fastest and the slowest run, and which runs were copies of one program."""
        plan = self.launch.plan
        ok = [r for r in plan.runs if r in self.states and self.states[r].status == "ok"]
        copies = [
            run_id
            for run_id in ok
            if plan.runs[run_id].world_size > 1
            and (read_job(plan.paths.run(run_id)) or {}).get("ranks_together") == "none"
        ]
        rates = [
            (at.rate, run_id, at.unit)
            for run_id, at in self.progress.items()
            if at.rate is not None and run_id in ok and not copies
        ]
        if len(rates) > 1 and len({unit for _, _, unit in rates}) == 1:
            (high, best, unit), (low, worst, _) = max(rates), min(rates)
            self._print(f"fastest: {best}, {high:,.0f} {unit}/s; slowest: {worst}, {low:,.0f}")
        if copies:
            self._print(
                f"copies: nothing shows that the ranks of {counted(len(copies), 'run')} worked "
                "together: their rates are no speed-up. Start the program as one "
                "(--launcher torchrun, or once with mpirun), or state --together",
                "yellow",
            )

    def _print_runs(self, states: Mapping[str, RunState]) -> bool:
        """Print the runs that are not ok, with their logs; return whether all are ok."""
        bad = {run_id: state for run_id, state in states.items() if state.status != "ok"}
        total = len(states)
        if not bad:
            self._print(f"all {total} runs are ok" if total > 1 else "the run is ok", "green")
            return True
        self._print(f"{total - len(bad)} of {counted(total, 'run')} ok; not ok:")
        alike: dict[tuple[str, str], list[str]] = {}
        for run_id, state in bad.items():
            alike.setdefault((state.status, state.reason), []).append(run_id)
        for (status, reason), run_ids in alike.items():
            if status != "missing":
                more = len(run_ids) - _MAX_NAMED
                names = ", ".join(run_ids[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
                self._print(f"  {counted(len(run_ids), 'run')} {status}: {reason}", "red")
                log = short_path(self.launch.plan.paths.run(run_ids[0]).log)
                self._print(f"    {names}; log: {log}")
        if never := sum(state.status == "missing" for state in bad.values()):
            self._print(f"  {never} never started", "red")
        self._print("to continue, run the same command again: only these are started")
        return False
