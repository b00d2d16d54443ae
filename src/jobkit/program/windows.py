"""The measurement of one process: its steps in windows, each a record."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from .lines import Writer, as_number, same_unit
from .machine import Sampler, watch
from .process import Guarded, cuda_in_use, guarded, machine, place, synchronised_s, warn
from .why import STEPS, Why

WINDOW_S = 10.0  # a window lasts about this long at most, if its steps are shorter
WINDOW_STEPS = 50  # and has so many steps at most, in the first WINDOW_STEPS**2 steps
FIRST_STEPS = 5  # and at most so many, or as many as were compared before it
WARMUP_STEPS = 5
OF_EPOCH = ("train_loss", "val_loss", "val_accuracy", "epoch_time_s", "lr")


def spacing(step_s: float, steps: int, compared: int) -> int:
    """Steps of a window: 1, 5, 10, 50, ... Each divides the next, so that ranks share ends.

    steps: done so far; compared: those of them after the warm-up. A program that ends by os._exit
    loses its last window, so a short one has short windows.
    """
    most = max(WINDOW_STEPS, steps / WINDOW_STEPS)
    most = min(WINDOW_S / max(step_s, 1e-9), most, max(FIRST_STEPS, compared))
    size, factor = 1, 5
    while size * factor <= most:
        size, factor = size * factor, 7 - factor
    return size


class StepEvents:
    """An event after each step's work on the GPU, where a step on the host is only its issue.

    Nothing waits for the GPU: the events are read when a window ends, which synchronises anyway.
    Rare slow steps are what the mean of a window has above this median, see collect/why.py.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []  # None: between its neighbours lies more than a step

    def after_step(self) -> None:
        """A step has been issued; does nothing in a program without a GPU."""
        if cuda := cuda_in_use():
            event = None
            if not cuda.is_current_stream_capturing():
                event = cuda.Event(enable_timing=True)
                event.record()
            self._events.append(event)

    def cut(self) -> None:
        """The time until the next step is not that of a step."""
        self._events.append(None)

    def last_s(self, begin: float) -> float:
        """When the last step was done, if the first event was at begin; 0 where it is not known."""
        with contextlib.suppress(RuntimeError, ValueError, AttributeError, IndexError):
            first, last = self._events[0], self._events[-1]
            return begin + first.elapsed_time(last) / 1e3 if last.query() else 0.0
        return 0.0

    def times_s(self, mean_s: float) -> list[float]:
        """Seconds of the steps since the last call; none where their events cannot be compared.

        mean_s: of a step by the host's clock. Events that say less than half of it are of a stream
        or a device that does not do the work.
        """
        events, self._events = self._events, self._events[-1:]
        # Of two devices, or not done, as where another rank's crash left the GPU waiting.
        with contextlib.suppress(RuntimeError, ValueError):
            pairs = [(a, b) for a, b in pairwise(events) if a is not None and b is not None]
            found = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
            return found if sum(found) >= mean_s / 2 * len(found) else []
        return []


class Meter(Guarded):
    """Measures the steps of one process in windows; the functions of meter.py use one of them.

    Of two facts the study's own (JOBKIT_UNIT, JOBKIT_WORK_PER_STEP) holds.
    """

    def __init__(
        self, unit: str | None, source: str, environment: Mapping[str, str] | None = None
    ) -> None:
        env = self._environment = dict(os.environ if environment is None else environment)
        stated, of_study = env.get("JOBKIT_WORK_PER_STEP"), env.get("JOBKIT_UNIT")
        self.steps, self.failed, self.rank = 0, False, 0
        self._unit, self._source = of_study or unit, source
        self._counts = same_unit(unit, of_study)  # else another unit's work
        self._per_step = float(stated) if stated else None
        self._warmup = int(env.get("JOBKIT_WARMUP_STEPS") or WARMUP_STEPS)
        self._writer: Writer | None = None
        self._sampler: Sampler | None = None
        self._world, self._every, self._depth = 1, 1, 0
        self._epoch: float | None = None
        # Clock readings: begin of the window, end of the last step, begin of a wait and of a pause.
        self._begin: float | None = None
        self._last = 0.0
        self._waits: float | None = None
        self._pauses: float | None = None
        self._over: float | None = None  # the steps before a pause were done
        self._data: float | None = None  # seconds of waiting in the window; None: not measured
        asked = env.get("JOBKIT_WHY", "")
        profiled = int(asked) if asked.isdecimal() else STEPS
        self.why = Why(profiled if env.get("JOBKIT_RUN_DIR") else 0, self._warmup)
        self.aside = False  # the next step is not in the rate, as it may be profiled
        self._events = StepEvents()
        self._clear()

    def _clear(self) -> None:
        self._times: list[float] = []
        self._work: float | None = 0
        self._paused = 0.0
        self._data = None if self._data is None else 0.0

    @guarded
    def begin(self, at: float | None) -> None:
        """The first step begins, or began at a reading of the clock; None: it was not seen."""
        if not self.steps:
            self._begin, self._last = at, at or 0.0

    @guarded
    def wait(self) -> None:
        """A batch is asked for."""
        self._waits = time.perf_counter()

    @guarded
    def got(self) -> None:
        """The batch is there."""
        if self._waits is not None:
            self.waited(max(0.0, (self._pauses or time.perf_counter()) - self._waits))
            self._waits = None

    @guarded
    def waited(self, seconds: float) -> None:
        """Batches were waited for."""
        self._data = (self._data or 0.0) + seconds

    @guarded
    def pause(self) -> None:
        """What is no training begins; pauses may be nested."""
        self._depth += 1
        if self._depth == 1:
            self._pauses = synchronised_s()
            self.why.interrupt()

    @guarded
    def resume(self) -> None:
        """It is over."""
        self._depth -= 1
        if self._depth == 0 and self._pauses is not None:
            now = synchronised_s()
            begin, self._pauses = self._pauses, None
            self._waits = None if self._waits is None else now
            self.exclude(begin, now)

    @guarded
    def hold(self, paused: bool) -> None:
        """Be paused, or not, however often it is said."""
        if paused is (self._pauses is None):
            self.pause() if paused else self.resume()

    @guarded
    def exclude(self, begin: float, end: float) -> None:
        """Take a stretch since the last step out of the time, by two readings of the clock."""
        self.why.interrupt()
        lost = max(0.0, end - max(begin, self._last))
        self._events.cut()
        self._paused += lost
        self._last += lost
        if self._begin is not None:
            self._begin += lost

    @guarded
    def idle(self) -> float:
        """The reading of the clock, all steps done on the GPU: for a pause that begins."""
        self._over = self._over or synchronised_s()
        self.why.interrupt()
        return self._over

    @guarded
    def step(self, work: float | None) -> None:
        """An optimizer step is done. Not counted in a window where its begin was not seen."""
        work = work if self._counts else None
        if self._writer is None:
            self._open(work)
        now = self._pauses or time.perf_counter()
        self._over = None
        self.steps += 1
        if self.aside:
            self._between()
            return
        if self._begin is None:
            self._events.cut()
            self._events.after_step()
            self._begin = self._last = now
            self._clear()  # what was waited for is of a step that is in no window
            return
        self._events.after_step()
        self._times.append(now - self._last)
        self._last = now
        if self._per_step is not None:
            work = self._per_step / self._world
        self._work = None if work is None or self._work is None else self._work + work
        if now - self._begin > WINDOW_S and self.steps > self._warmup:
            self._every = self._spacing(sum(self._times) / len(self._times))
        # All ranks end a window at the same steps: those that their common spacing divides.
        shared = self.steps > self._warmup and self.steps % self._every == 0
        if shared or self.steps == self._warmup:
            self.close()
        if self.steps >= self.why.place:
            self.close()
            self._between()

    def span(self, name: str) -> Any:
        """Name what happens inside for the profile, where there may be one."""
        profiler = sys.modules["torch"].autograd.profiler if self.aside else None
        return profiler.record_function(name) if profiler else contextlib.nullcontext()

    def _between(self) -> None:
        """A step before, in or after some that are profiled: what follows is not in the rate."""
        self.why.stepped(self.steps)
        self.aside = self.why.aside(self.steps)
        self._events.cut()
        now = time.perf_counter if self.aside else synchronised_s  # a GPU may be a step behind
        self._begin = self._last = self._pauses or now()
        self._waits = None if self._waits is None else self._last
        self._clear()

    def _spacing(self, step_s: float) -> int:
        return spacing(step_s, self.steps, self.steps - self._warmup)

    @guarded
    def close(self, at: float | None = None) -> None:
        """Write the window, if a step is in it; at: where it ended, if not now."""
        if not self._times or self._begin is None or self._writer is None:
            return
        now = at or self._pauses or synchronised_s()
        if self._waits is not None:  # the rest belongs to the next window
            self.waited(now - self._waits)
            self._waits = now
        wall, times = now - self._begin, self._times
        warm = self.steps <= self._warmup
        on_device = self._events.times_s(wall / len(times))
        ordered = sorted(on_device if cuda_in_use() else times)
        self._write(
            "window",
            step=self.steps,
            steps=len(times),
            wall_s=wall,
            work=self._work,
            data_wait_s=self._data,
            paused_s=self._paused,
            epoch=self._epoch,
            **({"step_p50_s": ordered[(len(ordered) - 1) // 2]} if ordered else {}),
            warmup=warm,
        )
        # A mean of the warm-up has the start-up in it.
        self._every = self._spacing(min(times) if warm else wall / len(times))
        self._begin = self._last = now
        self._clear()

    @guarded
    def epoch(self, number: float, values: Mapping[str, Any]) -> None:
        """An epoch is done."""
        self._epoch = number
        self.close()
        known = {k: as_number(v) for k, v in values.items()}
        own = {k: known.pop(k) for k in OF_EPOCH if k in known}
        self._write_first("epoch", epoch=number, **own, **({"values": known} if known else {}))
        self._epoch = number + 1

    def _open(self, work: float | None) -> None:
        """Open the rank's file and write run_start: at the first step, when the rank is known."""
        env = self._environment
        rank, self._world, group_size = place(env)
        folder, attempt = env.get("JOBKIT_RUN_DIR"), int(env.get("JOBKIT_ATTEMPT") or 0)

        def writer(kind: str, log: Any = None) -> Writer:
            name = f"{attempt}{kind}.jsonl"
            return Writer(
                study=env.get("JOBKIT_STUDY", ""), run_id=env.get("JOBKIT_RUN_ID", ""),
                attempt=attempt, rank=rank,
                path=Path(folder, "metrics", name) if folder else None, log=log,
            )  # fmt: skip

        # The process's own standard output: a progress bar that replaced it may wrap lines.
        output = sys.__stdout__ if folder else sys.stdout
        self._writer = writer(f".r{rank}" if rank else "", None if rank else output)
        self.rank = rank
        if not self._writer.continue_alone():
            text = "another process measures as this rank already"
            if folder and rank == 0:  # beside its file, which the other one has
                writer(".r0").write("message", level="warning", text=text)
            raise RuntimeError(text)
        how = "inferred" if self._source == "auto" else "counted" if work is not None else None
        self._write(
            "run_start",
            source=self._source,
            world_size=self._world,
            group_size=group_size,
            **machine(),
            unit=self._unit,
            work_per_step=self._per_step,
            work_source="stated" if self._per_step is not None else how if self._counts else None,
            warmup_steps=self._warmup,
            job_id=env.get("SLURM_JOB_ID"),
        )
        if folder:
            env = {**env, **os.environ}
            self._sampler = watch(partial(writer, f".s{rank}"), rank, env)
            self.why.open(partial(writer, f".w{rank}"), Path(folder), env, rank)

    def _write(self, kind: str, **fields: Any) -> None:
        try:
            if self._writer:
                self._writer.write(kind, **fields)
        except OSError as error:  # such as a full disk: it may have room again later
            if not self.failed:
                warn(f"a record was lost: {error}")
            self.failed = True

    def _write_first(self, kind: str, **fields: Any) -> None:
        """Write a record that is the same on every rank: rank 0 does."""
        if self._writer is None:
            self._open(None)
        if self.rank == 0:
            self._write(kind, **fields)

    @guarded
    def end(self, status: str, reason: str) -> None:
        """Write the last window and run_end (rank 0)."""
        self.close()
        self._write_first("run_end", status=status, reason=reason[:300])
        self.leave()

    @guarded
    def leave(self) -> None:
        """Measure no more, and let another process write as this rank."""
        self.why.end(self.steps)
        self.on = False
        if self._sampler:
            self._sampler.stop()
        if self._writer:
            self._writer.close()

    @guarded
    def exited(self) -> None:
        """The process ends without end(): write what is known up to the last step.

        The GPU is not synchronised: it may wait for a rank that has crashed.
        """
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._write_first("run_end", status="failed", reason=f"{error!r}"[:300])
        else:
            done = self._events.last_s(self._begin - self._paused) if self._begin else 0.0
            self.close(self._over or max(self._last, done))
