"""The table of a study's runs, and what a launch in the foreground prints."""

import shlex
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jobkit.errors import Exit
from jobkit.launch.launcher import Launch, pause_s
from jobkit.launch.states import Progress, States, counted, duration, progress
from jobkit.outcome.state import FINAL, RunState, read_job
from jobkit.paths import short_path
from jobkit.processes import END_SIGNALS, Signals

_POLL_S = 0.4
_COLOURS = {"ok": "green", "running": "cyan", "pending": "dim", "cancelled": "yellow"}
_QUIET_S = 600.0  # a running run that writes nothing for so long may hang
_MAX_REASON = 100  # characters of a reason in a line for one run
_MAX_NAMED = 3  # runs named where several ended for the same reason


def study_view(looks: States, listed: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Text:
    """The table of these runs below how many there are of each status, and then the notes."""
    counts = Counter(state.status for state in looks.of_runs.values())
    summary = ", ".join(f"{n} {status}" for status, n in counts.items())
    title = f"{looks.plan.study.name}: {counted(len(looks.plan.runs), 'run')}: {summary}"
    return Text("\n").join([Text(title), *_table(listed), *map(Text, notes)])


def _table(listed: Sequence[Mapping[str, Any]]) -> list[Text]:
    """The heading and the runs, with the columns in which a run has something.

    A reason is long: it has a line of its own.
    """
    units = {row["unit"] for row in listed if row["rate"] is not None}
    rate_head = f"{units.pop()}/s" if len(units) == 1 else "rate"
    rows, details, above = [dict[str, str]()], [""], ""
    for row in listed:
        loss, rate, step = row["val_loss"], row["rate"], row["step"]
        unit = f" {row['unit']}/s" if rate_head == "rate" else ""
        rows.append({
            "run": row["run_id"],
            "status": row["status"],
            "epoch": f"{row['epoch']}/{row['epochs']}" if row["epochs"] else "",
            "step": f"{step:,.0f}" if step is not None and not row["epochs"] else "",
            "loss": "" if loss is None else f"{loss:.3f}",
            rate_head: "" if rate is None else f"{rate:,.0f}{unit}",
            "time": duration(row["elapsed_s"]),
        })  # fmt: skip
        reason = "" if row["status"] in ("ok", "running") else str(row["reason"])
        if (row["quiet_s"] or 0) > _QUIET_S:
            reason = f"no output or record for {duration(row['quiet_s'])}: it may hang"
        details.append(f"\n    {'as above' if reason and reason == above else reason}")
        above = reason
    names = [name for name in (rows[-1] if listed else []) if any(row.get(name) for row in rows)]
    rows[0] = {name: name for name in names}
    lines = []
    for row, detail in zip(rows, details, strict=True):
        cells = []
        for name in names:
            width, is_text = max(len(row[name]) for row in rows), name in ("run", "status")
            text = row[name].ljust(width) if is_text else row[name].rjust(width)
            style = _COLOURS.get(row[name], "red") if name == "status" and row != rows[0] else ""
            cells.append(Text(text, style))
        lines.append(Text("  ").join(cells).append(detail.rstrip()))
    return lines


# --- a launch in the foreground ---------------------------------------------------------------


class Foreground:
    """Prints a launch, from its notes to its results, on a console."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.name = launch, launch.plan.study.name
        self.console = Console(highlight=False, markup=False)
        self.states: dict[str, RunState] = {}
        self.progress: dict[str, Progress] = {}
        self._notes = 0
        self._printed: dict[str, tuple[str, int]] = {}

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, soft_wrap=True)

    def announce(self) -> None:
        """Print how many runs will start, where, and what they may cost."""
        launch, new = self.launch, len(self.launch.run_ids)
        states = launch.looks.of_runs.items()
        other = Counter(state.status for r, state in states if r not in launch.run_ids)
        parts = [f"study {self.name}: {counted(len(launch.plan.runs), 'run')} planned"]
        parts += [f"{n} {status} already" for status, n in other.items()]
        parts += [f"{new} to start" if new else "none to start (to measure again: another --name)"]
        of_each = " of each size" if len(launch.batches) > 1 else ""
        parts += [f"{launch.at_once} at a time{of_each}"] if new and launch.at_once else []
        self._print(f"{', '.join(parts)}, in {short_path(launch.folder)}")
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
        if self.launch.where:
            self._print(f"started: {self.launch.where}")

    def _print_notes(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._print(f"note: {note}", "yellow")

    def next_steps(self) -> int:
        """Print how to follow and how to cancel runs that continue; return the exit code."""
        status, cancel = (f"python -m jobkit {word} {self.name}" for word in ("status", "cancel"))
        self._print(f"next: {status} --watch | {cancel}")
        self._print_later()
        return Exit.INCOMPLETE if self.launch.left else Exit.OK

    def _print_later(self) -> None:
        """Print how to submit the runs that Slurm has not taken, and the way to the results."""
        if left := self.launch.left:
            runs = counted(len(left), "run")
            self._print(f"then: the same command again, which submits the other {runs}", "yellow")
        self._print_plot("after the last run")

    def _print_plot(self, when: str) -> None:
        """Print which command makes the results, and when to type it."""
        here = Path("plot_results.sh").exists()  # a program's own folder has none
        plot = "./plot_results.sh" if here else "jobkit plot --collect"
        folder = shlex.quote(short_path(self.launch.folder))
        self._print(f"{when}: {plot} {folder}    (tables, figures, report)")

    def follow(self) -> int:
        """Show the study until it has ended; return the exit code.

        SIGINT, SIGTERM and SIGHUP end the runs of this machine; jobs on Slurm continue.
        """
        signum = self.watch(Signals())
        if signum is None:
            return self.conclude()
        if self.launch.site is not None:
            self._print(f"the jobs continue; to end them: python -m jobkit cancel {self.name}")
            self._print_later()
        else:
            self._print("stopping: ending the active runs ...", "yellow")
            self.launch.cancel()
            self._print_runs(self.launch.states())
        return Exit.INTERRUPTED if signum == signal.SIGINT else Exit.TERMINATED

    def watch(self, signals: Signals) -> int | None:
        """Print a line for each change until all runs have ended, or a signal comes: return it."""
        while True:
            begin, active = time.monotonic(), self.launch.running()
            before, self.states = self.states, self.launch.states()
            for run_id in self.launch.run_ids:
                state, job = self.states[run_id], self.launch.looks.jobs.get(run_id)
                status = state.status
                ended = run_id in before and before[run_id].status in FINAL
                if status == "running" or (status in FINAL and not ended):
                    paths, spec = self.launch.plan.paths.run(run_id), self.launch.plan.runs[run_id]
                    self.progress[run_id] = progress(paths, spec, state, job)
            self._print_events()
            if not active:
                return None
            for signum in signals.wait(pause_s(time.monotonic() - begin, _POLL_S)):
                if signum in END_SIGNALS:
                    return signum

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
                text = f"ok{took}{', ' + at.text if at and at.text else ''}{self._left()}"
            else:  # the whole reason stands at the end and in the log
                reason = state.reason
                cut = reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 4]} ..."
                text = f"{state.status}{took}: {cut}"
            line = f"[{number}/{len(self.launch.run_ids)}] {run_id}: {text}"
            self._print(line, _COLOURS.get(state.status, "red"))

    def _left(self) -> str:
        """About how long the other runs take, if they are as fast as those that were ok."""
        status = [self.states[run_id].status for run_id in self.launch.run_ids]
        ok = (at for run_id, at in self.progress.items() if self.states[run_id].status == "ok")
        known = [at.elapsed_s for at in ok if at.elapsed_s is not None]
        waiting = sum(name not in FINAL for name in status)
        if not known or not waiting:
            return ""
        left_s = statistics.median(known) * waiting / (self.launch.at_once or waiting)
        return f"; about {duration(left_s)} left"

    # --- the end ------------------------------------------------------------------------------

    def conclude(self) -> int:
        """Print what became of the runs, where their files are, and the next command."""
        states = self.launch.states()
        all_ok = self._print_runs(states)
        self._print_copies(states)
        folder = short_path(self.launch.folder)
        self._print(f"files: {folder}: a folder for each run, with its log and its records")
        if any(state.status == "ok" for state in states.values()):
            self._print_plot("next")
        return Exit.OK if all_ok else Exit.FAILED

    def _print_copies(self, states: Mapping[str, RunState]) -> None:
        """Print where runs were copies of one program: their rates are no speed-up."""
        plan = self.launch.plan
        copies = sum(
            spec.world_size > 1
            and states[run_id].status == "ok"
            and (read_job(plan.paths.run(run_id)) or {}).get("ranks_together") == "none"
            for run_id, spec in plan.runs.items()
        )
        if copies:
            what = f"nothing shows that the ranks of {counted(copies, 'run')} worked together"
            fix = "Give it DDP, or start it with its own launcher (--launcher once)"
            text = f"copies: {what}: their rates are no speed-up. {fix}, or state --together"
            self._print(text, "yellow")

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
                names, more = ", ".join(run_ids[:_MAX_NAMED]), len(run_ids) - _MAX_NAMED
                names += f" and {more} more" if more > 0 else ""
                self._print(f"  {counted(len(run_ids), 'run')} {status}: {reason}", "red")
                log = short_path(self.launch.plan.paths.run(run_ids[0]).log)
                self._print(f"    {names}; log: {log}")
        if never := [state for state in bad.values() if state.status == "missing"]:
            why = f": {never[0].reason}" * bool(never[0].evidence)  # what ended their job
            self._print(f"  {len(never)} never started{why}", "red")
        self._print("to continue, run the same command again: only these are started")
        return False
