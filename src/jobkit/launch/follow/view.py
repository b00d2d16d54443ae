"""Shows a running study: a live table on a terminal, elsewhere one plain line per event."""

import statistics
import time
from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobkit.launch.follow.progress import Progress, duration, progress
from jobkit.launch.launcher import Launch, pause_s
from jobkit.outcome.state import FINAL, RunState

_POLL_S = 0.4
_COLOURS = {"ok": "green", "running": "cyan", "pending": "dim", "cancelled": "yellow"}
_RECENT = 8  # ended runs that the live table still shows


def style(status: str) -> str:
    """The colour of a status; every failure is red."""
    return _COLOURS.get(status, "red")


class View:
    """The states and the progress of a launch, and their display."""

    def __init__(self, launch: Launch, console: Console) -> None:
        self.launch, self.console = launch, console
        self.states: dict[str, RunState] = {}
        self.progress: dict[str, Progress] = {}
        self._begun, self._pause_s = time.monotonic(), _POLL_S
        self._printed: dict[str, tuple[str, int]] = {}
        self._ended: set[str] = set()

    def follow(self) -> dict[str, RunState]:
        """Show the study until all its runs have ended; return their states."""
        if self.console.is_terminal:
            with Live(console=self.console, refresh_per_second=4, transient=True) as live:
                while self._look():
                    live.update(self.table())
                    time.sleep(self._pause_s)
            self._say_events()
        else:
            while self._look():
                self._say_events()
                time.sleep(self._pause_s)
            self._say_events()
        return self.states

    def _look(self) -> bool:
        """Read the states of all runs; return whether one still waits or runs."""
        begin = time.monotonic()
        active = self._read()
        self._pause_s = pause_s(time.monotonic() - begin, _POLL_S)
        return active

    def _read(self) -> bool:
        active = self.launch.running()
        self.states = self.launch.states()
        for run_id in self.launch.run_ids:
            status = self.states[run_id].status
            if status == "running" or (status in FINAL and run_id not in self._ended):
                self.progress[run_id] = self._progress(run_id)
            if status in FINAL:
                self._ended.add(run_id)
        return active

    def _progress(self, run_id: str) -> Progress:
        plan = self.launch.plan
        return progress(plan.paths.run(run_id), plan.runs[run_id], self.states[run_id].attempt)

    # --- plain lines -------------------------------------------------------------------------

    def _say_events(self) -> None:
        """Print one line for each change since the last update: a start, an epoch, an end."""
        for number, run_id in enumerate(self.launch.run_ids, 1):
            state, at = self.states[run_id], self.progress.get(run_id)
            now = (state.status, at.epoch if at else 0)
            if state.status not in ("running", *FINAL) or self._printed.get(run_id) == now:
                continue
            self._printed[run_id] = now
            head = f"[{number}/{len(self.launch.run_ids)}] {run_id}:"
            took = f" in {duration(at.elapsed_s)}" if at and at.elapsed_s is not None else ""
            if state.status == "running":
                line = f"{head} {at.text if at else 'starting'}"
            elif state.status == "ok":
                line = f"{head} ok{took}{', ' + at.done if at and at.done else ''}"
            else:
                line = f"{head} {state.status}{took}: {state.reason}"
            self.console.print(
                Text(line, style=style(state.status)), soft_wrap=True, highlight=False
            )

    # --- the live table ----------------------------------------------------------------------

    def table(self) -> RenderableType:
        """The active runs, the last ones that ended, a bar, and the time left."""
        rows = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="bold")
        for heading in ("run", "status", "progress", "time"):
            rows.add_column(heading, overflow="fold" if heading == "progress" else "ellipsis")
        order = {"running": 1}
        shown = [r for r in self.launch.run_ids if self.states[r].status in ("running", *FINAL)]
        ended = [r for r in shown if self.states[r].status != "running"][-_RECENT:]
        for run_id in sorted(
            (r for r in shown if self.states[r].status == "running" or r in ended),
            key=lambda r: order.get(self.states[r].status, 0),
        ):
            rows.add_row(*self._row(run_id))
        return Group(rows, Text(""), self._bar())

    def _row(self, run_id: str) -> list[RenderableType]:
        state, at = self.states[run_id], self.progress.get(run_id)
        text = state.reason
        if at and state.status in ("running", "ok"):
            text = at.text if state.status == "running" else at.done
        elapsed = duration(at.elapsed_s) if at else ""
        return [run_id, Text(state.status, style=style(state.status)), text, elapsed]

    def _bar(self) -> RenderableType:
        counts = Counter(self.states[r].status for r in self.launch.run_ids)
        total = len(self.launch.run_ids)
        done = sum(counts[status] for status in FINAL)
        part = sum(
            at.epoch / at.epochs
            for r, at in self.progress.items()
            if self.states[r].status == "running" and at.epochs
        )
        summary = ", ".join(f"{n} {status}" for status, n in counts.items())
        left = self.left_s()
        times = f"{duration(time.monotonic() - self._begun)} elapsed"
        if left is not None:
            times += f", about {duration(left)} left"
        grid = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=total, completed=done + part, width=30)
        grid.add_row(bar, f"{done}/{total} runs", Text(summary, style="dim"), times)
        return grid

    def left_s(self) -> float | None:
        """Estimated seconds until all runs have ended; None before the first epoch has."""
        took = [
            at.elapsed_s
            for r, at in self.progress.items()
            if self.states[r].status == "ok" and at.elapsed_s is not None
        ]
        now = [a for r, a in self.progress.items() if self.states[r].status == "running"]
        whole = [
            a.elapsed_s + a.left_s for a in now if a.left_s is not None and a.elapsed_s is not None
        ]
        if not took and not whole:
            return None
        usual = statistics.median(took or whole)
        waiting = sum(self.states[r].status in ("pending", "missing") for r in self.launch.run_ids)
        left = sum(
            a.left_s if a.left_s is not None else max(0.0, usual - (a.elapsed_s or 0.0))
            for a in now
        )
        return (left + waiting * usual) / (self.launch.at_once or max(1, len(now)))
