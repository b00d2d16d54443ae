"""The measurements of the communication benchmark: teams of ranks, sizes, iterations, results."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from jobkit.checks.comm.memory import free_bytes
from jobkit.checks.comm.ops import COPIES, Exchange, Team, exchange
from jobkit.checks.comm.request import DEFAULT_MAX_BYTES, Request
from jobkit.errors import UsageError
from jobkit.metric.comm import Sample, sample
from jobkit.payload.distributed import Group
from jobkit.payload.report import Reporter
from jobkit.units import say_bytes, say_seconds

_LEAST = 3  # minimum of timed iterations, however long they take
_SHARE = 0.5  # of the memory that is free: the rest is for the backend and other programs
# What torch says of an operation that a backend does not have.
_LACKS = ("not support", "unsupported", "not implemented", "no backend")
HEAD = (
    f"{'operation':<15} {'ranks':>5}  {'where':<10} {'size':>9} {'time':>10} {'fastest':>10}"
    f" {'slowest':>10} {'algbw':>8} {'busbw':>8}"
)


@dataclass(frozen=True)
class Measured:
    """What a rank measured at one size; the times are the same on every member of the team."""

    bytes: int = 0
    times: tuple[float, ...] = ()  # seconds of each iteration, slowest member
    right: bool = True
    pipelined: float | None = None  # seconds of one of several in a row; None on the CPU
    lacks: str = ""  # why the backend cannot do this


@dataclass(frozen=True)
class Bench:
    """The job's group, what it is to measure, and where results are reported."""

    group: Group
    request: Request
    report: Reporter

    def run(self) -> list[Sample]:
        """Measure every operation at every size, with a record each; every rank has the results.

        Raises UsageError, on every rank, where --max-bytes does not fit in memory.
        """
        sizes = self._sizes()
        self.report.say(HEAD)
        found: list[Sample] = []
        for operation in self.request.operations:
            for scope, team in self._teams(operation):
                found += self._sweep(operation, scope, team, sizes)
        return found

    def _sizes(self) -> list[int]:
        """Return the sizes that fit in the memory of the rank that has least."""
        request, group = self.request, self.group
        free = group.gather(free_bytes(group.device, group.place.local_world_size))
        least = min(free)
        fits = int(least * _SHARE / COPIES)
        most = request.max_bytes or max(DEFAULT_MAX_BYTES, request.min_bytes)
        if fits < most:
            room = f"{COPIES} buffers must fit in half of the {say_bytes(least)} that rank "
            room += f"{free.index(least)} has free, so that {say_bytes(fits)} is the most"
            if request.max_bytes or fits < request.min_bytes:
                raise UsageError(f"--max-bytes {say_bytes(most)} is too much: {room}")
            self.report.warn(f"sizes end before {say_bytes(most)}: {room}")
        return request.sizes(min(most, fits))

    def _teams(self, operation: str) -> Iterator[tuple[str, Team]]:
        """Yield all ranks; for sendrecv the first two of a node, and the first of two nodes."""
        place, device = self.group.place, self.group.device
        if operation != "sendrecv":
            yield "all", Team(tuple(range(place.world_size)), place.rank, device)
            return
        pairs = {"intra_node": 1} if place.local_world_size > 1 else {}
        pairs |= {"inter_node": place.local_world_size} if place.nodes > 1 else {}
        for scope, other in pairs.items():
            group = dist.new_group([0, other])  # every rank must call this
            yield scope, Team((0, other), place.rank, device, group)

    def _sweep(self, operation: str, scope: str, team: Team, sizes: list[int]) -> list[Sample]:
        """Return the samples of one operation, up to a size that takes too long."""
        found: list[Sample] = []
        nodes = self.group.place.nodes if scope == "all" else 1 + (scope == "inter_node")
        for size in sizes:
            own = self._measure(operation, team, size) if team.rank in team.members else None
            told: list[Measured | None] = self.group.gather(own)  # the others wait here
            first = told[0]
            assert first is not None  # rank 0 is in every team
            if first.lacks:
                self.report.warn(f"{operation} is skipped: {first.lacks}")
                break
            right = all(one.right for one in told if one)
            one = sample(operation, scope, team.size, nodes, first.bytes, first.times, right)
            one = replace(one, pipelined_time_s=first.pipelined)
            found.append(one)
            self.report.record("comm", **asdict(one))
            self.report.say(line(one))
            if one.time_s > self.request.seconds_per_size and size < sizes[-1]:
                self.report.warn(
                    f"{operation} stops at {say_bytes(size)}: it takes {say_seconds(one.time_s)}, "
                    f"and --seconds-per-size is {self.request.seconds_per_size:g}"
                )
                break
        return found

    def _measure(self, operation: str, team: Team, size: int) -> Measured:
        """Time one operation at one size, and check what the last iteration left."""
        made, request = exchange(operation, team, size), self.request
        try:
            (first_s,) = timed(made, team, 1)  # it connects the ranks, too
        except (RuntimeError, NotImplementedError) as error:
            if any(word in str(error).lower() for word in _LACKS):
                return Measured(lacks=str(error).strip().splitlines()[0][:200])
            raise
        room = request.seconds_per_size
        warm = timed(made, team, max(1, min(request.warmup - 1, int(room / first_s))))
        count = max(_LEAST, min(request.iterations, int(room / min(warm))))
        times = timed(made, team, min(count, request.iterations))
        right = made.is_right()
        # On the CPU an operation is done when its call returns: nothing is in flight.
        on_gpu = team.device.type == "cuda"
        pipelined = in_a_row(made, team, len(times)) if on_gpu else None
        return Measured(made.bytes, tuple(times), right, pipelined=pipelined)


def timed(made: Exchange, team: Team, count: int) -> list[float]:
    """Return the seconds of each run, maximum over the members: the same on all of them.

    A barrier comes before each run, so that no time includes waiting for a late member; the device
    is synchronised around it. A latency so includes the launch of the operation.
    """
    taken = []
    for _ in range(count):
        made.prepare()
        team.synchronise()
        team.barrier()
        start = time.perf_counter()
        made.run()
        team.synchronise()
        taken.append(time.perf_counter() - start)
    return team.largest(taken)


def in_a_row(made: Exchange, team: Team, count: int) -> float:
    """Return the seconds of one run of several that are issued one after the other.

    The device is synchronised after the last: no run waits for the host, as in nccl-tests.
    """
    made.prepare()
    team.synchronise()
    team.barrier()
    start = time.perf_counter()
    for _ in range(count):
        made.run()
    team.synchronise()
    (taken,) = team.largest([(time.perf_counter() - start) / count])
    return taken


def line(one: Sample) -> str:
    """Return one result for people, under HEAD."""
    times = (say_seconds(t) for t in (one.time_s, one.time_low_s, one.time_high_s))
    return (
        f"{one.operation:<15} {one.ranks:>5}  {one.scope:<10} {say_bytes(one.bytes):>9}"
        f" {' '.join(f'{text:>10}' for text in times)}"
        f" {one.algorithm_gb_per_s:>8.4f} {one.bus_gb_per_s:>8.4f} GB/s"
        f"{'' if one.correct else '  WRONG RESULT'}"
    )
