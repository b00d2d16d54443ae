"""Where the time of some steps goes: compute, communication, data, the host, an idle GPU.

At some places of a run torch.profiler watches a few steps on each rank, which are not in the rate.
On a GPU kernels decide. On the CPU spans do: `gloo:` communicates, `aten::` computes, a loader's
iterator waits for data, and what is left is the host: Python, launches, the program's own code.
The spans of the collectives are written as well, as jobkit.analysis.why compares them over the
ranks. Nothing here communicates, and an error ends this measurement with one line.
"""

import bisect
import contextlib
import gzip
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .lines import Writer
from .process import Guarded, cuda_in_use, guarded, host_name, local_rank, synchronised_s

STEPS = 5  # of a place, unless JOBKIT_WHY says another number
FIRST_PLACE, GROWTH = 5, 2  # steps after the warm-up; a place's step / that of the one before
MAX_SHARE = 0.02  # of the time so far, that the places after the first may take
SLOWER = 1.25  # times the slowest step of the trace so far: it is replaced
MAX_RANKS = 8  # of a node, that are profiled
MAX_GROWTH_MIB = 150.0  # of the process's memory at a place, after which the place ends
MAX_EVENTS = 200_000  # of a trace that is written
_MARK = "jobkit: step"
DATA = "enumerate(DataLoader) of jobkit"  # names spans in which a batch is made
OWN = "jobkit: own"  # names spans whose collectives are not the program's, and not waited for
Span = tuple[int, int]  # nanoseconds
MakeWriter = Callable[[], Writer | None]


def union(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, joined where they touch."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def minus(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What is in the first of two ordered lists and not in the second."""
    left: list[Span] = []
    first = 0
    for begin, end in spans:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        for i in range(first, len(others)):
            if others[i][0] >= end:
                break
            if others[i][0] > begin:
                left.append((begin, others[i][0]))
            begin = max(begin, others[i][1])
        if begin < end:
            left.append((begin, end))
    return left


def between(spans: Iterable[Span], begin: int, end: int) -> list[Span]:
    """The parts of spans that lie between two times."""
    return [(max(a, begin), min(b, end)) for a, b in spans if b > begin and a < end]


def measured(events: Iterable[Any], gpu: bool) -> dict[str, Any] | None:
    """The fields of a why record from the profiler's events; None with less than one step.

    parts: seconds of each step; on a GPU, which is behind the host, the mean over the steps.
    """
    marks: list[int] = []
    work, data, own = list[Span](), list[Span](), list[Span]()
    issued: list[tuple[int, str]] = []
    collectives: list[tuple[int, int, str]] = []
    for event in events:
        name, begin = event.name(), event.start_ns()
        span = (begin, begin + event.duration_ns())
        if name.startswith("aten::"):
            if not gpu:
                work.append(span)
        elif gpu and event.device_type().name == "CUDA" and not event.is_user_annotation():
            if name.startswith(("nccl", "rccl")):
                collectives.append((*span, name.split("(")[0][:60]))
            else:
                work.append(span)
        elif name.startswith(("gloo:", "mpi:")):
            if not gpu:
                collectives.append((*span, name))
        elif name.startswith("enumerate(DataLoader)"):
            data.append(span)
        elif name == _MARK:
            marks.append(begin)
        elif name.startswith("c10d::"):
            issued.append((begin, name[6:].lstrip("_").split("_")[0]))
        elif name == OWN:
            own.append(span)
    if len(marks) < 2:
        return None
    marks.sort()
    collectives.sort()
    if not gpu:  # a GPU's are NCCL's, and those of jobkit are Gloo's
        collectives = _without(collectives, sorted(own), issued)
    waiting, busy = union(data), union(work)
    together = union((begin, end) for begin, end, _ in collectives)
    if gpu:
        exposed = minus(together, busy)
        waiting = minus(minus(waiting, busy), exposed)
        edges, steps = [marks[0], marks[-1]], len(marks) - 1  # the mean of so many
    else:
        busy = minus(busy, waiting)
        exposed = minus(minus(together, busy), waiting)
        edges, steps = marks, 1
    zero, parts, spans = edges[0], [], list[Span]()
    for begin, end in pairwise(edges):
        inside = [between(some, begin, end) for some in (busy, exposed, waiting)]
        lengths = [end - begin, *(sum(b - a for a, b in some) for some in inside)]
        lengths.append(max(0, lengths[0] - sum(lengths[1:])))
        parts.append([n / 1e9 / steps for n in lengths])
        spans += inside[1]
    return {
        "steps": len(marks) - 1,
        "gpu": gpu,
        "parts": parts,
        "collectives": [
            [bisect.bisect(edges, begin) - 1, name, (begin - zero) // 1000, (end - begin) // 1000]
            for begin, end, name in collectives
            if zero <= begin < edges[-1]
        ],
        "exposed": [[(a - zero) // 1000, (b - zero) // 1000] for a, b in spans],
    }


def _without(
    collectives: list[tuple[int, int, str]], own: Sequence[Span], issued: Sequence[tuple[int, str]]
) -> list[tuple[int, int, str]]:
    """The collectives but those that were issued within spans: the next ones of their kind.

    Gloo has several threads, so the next one to begin may be another that was issued at that time.
    """
    left = list(collectives)
    for begin, end in own:
        for kind in (name for at, name in issued if begin <= at < end):
            for i in range(bisect.bisect(left, (begin,)), len(left)):
                if kind in left[i][2].lower().replace("_", ""):
                    del left[i]
                    break
    return left


def resident_mib() -> float:
    """Memory of this process; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


class Why(Guarded):
    """The profiled steps of one process. Each place is written when it ends."""

    ends = "the causes are not measured any more"

    def __init__(self, steps: int, warmup: int) -> None:
        self.on, self._steps = steps > 0, steps
        self.place = warmup + FIRST_PLACE if steps else sys.maxsize  # the step before the next one
        self._open: MakeWriter | None = None
        self._writer: Writer | None = None
        self._trace: Path | None = None
        self._profile: Any = None
        self._marks, self._last, self._gpu = 0, 0, False
        self._begun, self._cost_s, self._places, self._slowest_s = time.perf_counter(), 0.0, 0, 0.0
        self._memory_mib = 0.0

    def open(
        self, writer: MakeWriter, folder: Path, environment: Mapping[str, str], rank: int
    ) -> None:
        """Profile this rank, if it is one of the first of its node; all leave the steps out.

        writer: makes that of its records, if there is one. folder: of the run.
        """
        if local_rank(environment, rank) < MAX_RANKS:
            self._open, self._trace = writer, folder / "traces" / f"why.rank{rank}.json.gz"

    def aside(self, step: int) -> bool:
        """Whether the step after this one is not in the rate.

        The steps of all candidates are aside, whether this rank has the time to profile them or
        not: the ranks need not decide alike. One before and one after take the unequal waits.
        """
        return self.on and self.place <= step < self.place + self._steps + 2

    @guarded
    def interrupt(self) -> None:
        """What is no training begins: the place ends with the steps that are done."""
        if self._profile is not None:
            self._finish()

    @guarded
    def end(self, step: int) -> None:
        """The program ends; says why nothing was profiled, if so."""
        if self._profile is not None and not self._gpu:  # a GPU may hang by now
            self._finish()
        if self._writer is None:
            over = self.place + self._steps + 1
            reason = f"the program ended after {step} steps; step {over} ends the first profile"
            self._write(reason=reason)
        self._stop()

    def _stop(self) -> None:
        self.on, self.place = False, sys.maxsize

    def give_up(self) -> None:
        """End the profile, which may fail as well."""
        self._stop()
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def _write(self, **fields: Any) -> None:
        if self._open and not self._writer:
            self._writer = self._open()
        if self._writer:
            self._writer.write("why", step=self._last, host=host_name(os.environ), **fields)

    @guarded
    def stepped(self, step: int) -> None:
        """A step at the beginning of a place or within it is done."""
        done, self._last = step - self.place, step
        if done == 0:
            self._start()
        elif self._profile is not None:
            if done in (1, self._steps + 1):
                synchronised_s()
            self._marks += 1
            with sys.modules["torch"].autograd.profiler.record_function(_MARK):
                pass
            if done == self._steps + 1 or resident_mib() - self._memory_mib > MAX_GROWTH_MIB:
                self._finish()
        if done >= self._steps + 1 and not self.aside(step):
            self.place = max(GROWTH * self.place, step + FIRST_PLACE)

    def _start(self) -> None:
        """Begin to profile, if there is time for it, and nobody else does."""
        torch, now = sys.modules.get("torch"), time.perf_counter()
        if torch is None:
            self._write(reason="the program does not use torch")
            self._stop()
            return
        cuda = cuda_in_use()
        self._gpu = cuda is not None
        expected = self._cost_s * (1 + 1 / max(1, self._places))
        too_much = expected > MAX_SHARE * (now - self._begun)
        capturing = self._gpu and cuda.is_current_stream_capturing()
        busy = torch.autograd._profiler_enabled()
        if self._open is None or too_much or capturing or busy:
            return
        _let_others_profile(torch.autograd.profiler.profile, self)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)  # no list of events in Python
        profile.start()
        self._profile, self._marks = profile, 0
        self._memory_mib = resident_mib()  # with what the profiler itself takes
        self._cost_s += time.perf_counter() - now

    def _finish(self) -> None:
        """End the profile, and write what it says."""
        begin = time.perf_counter()
        profile, self._profile = self._profile, None
        profile.stop()
        if self._marks < 2:
            return
        results = profile.profiler.kineto_results
        events = results.events()
        fields = measured(events, self._gpu)
        if fields and self._gpu and not fields["parts"][0][1]:
            self._write(
                reason="the profiler saw no kernel on the GPU (CUDA graphs, or no right to)"
            )
        elif fields:
            cuda = cuda_in_use()
            self._write(device=f"cuda:{cuda.current_device()}" if cuda else None, **fields)
            self._places += 1
            slowest = max(row[0] for row in fields["parts"])
            if self._trace and slowest > SLOWER * self._slowest_s and len(events) <= MAX_EVENTS:
                self._slowest_s = slowest
                _save(results, self._trace)
        self._cost_s += time.perf_counter() - begin


def _save(results: Any, path: Path) -> None:
    """The trace in Chrome's format, which https://ui.perfetto.dev opens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_name(f"{path.name}.{os.getpid()}")
    results.save(str(plain))
    with plain.open("rb") as file, gzip.open(f"{plain}.gz", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(file, packed)
    plain.unlink()
    Path(f"{plain}.gz").replace(path)


def _let_others_profile(profiler: Any, own: Why) -> None:
    """Have this profile end where the program starts one: torch has one at a time."""
    prepare = getattr(profiler, "_prepare_trace", None)
    if prepare is None or hasattr(prepare, "of_jobkit"):
        return

    def _prepare_trace(self: Any) -> None:
        ours = own._profile
        if ours is not None and ours.profiler is not self:
            own.interrupt()
        prepare(self)

    _prepare_trace.of_jobkit = True  # type: ignore[attr-defined]
    profiler._prepare_trace = _prepare_trace
