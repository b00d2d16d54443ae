"""The ranks of the communication benchmark: operations, their checks, timing, records, files.

Buffers are float32 and hold whole numbers below 2^24, so that a right sum is exact. A value
encodes its rank and its place, so that a part in the wrong place is detected.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobkit.checks.requests import DEFAULT_MAX_BYTES, CommRequest, check_ranks
from jobkit.errors import Exit, UsageError
from jobkit.metric import comm
from jobkit.metric.comm import Sample, sample
from jobkit.paths import RunPaths, write_json, write_whole
from jobkit.payload.device import device_name, git_commit, process_age_s, versions
from jobkit.payload.distributed import Group, banner, check_identity, join
from jobkit.payload.place import RankEnv, share_of_cores
from jobkit.payload.report import Reporter, write_outcome
from jobkit.units import say_bytes, say_seconds

_PERIOD = 251  # of the pattern: a prime, so that it fits no power of two
_COPIES = 4  # of a size that an operation may hold at once, its check included
_MIN_TIMED = 3  # iterations, however long they take
_SHARE = 0.5  # of the memory that is free: the rest is for the backend and other programs
# What torch says of an operation that a backend does not have.
_LACKS = ("not support", "unsupported", "not implemented", "no backend")
HEAD = (
    f"{'operation':<15} {'ranks':>5}  {'where':<10} {'size':>9} {'time':>10} {'fastest':>10}"
    f" {'slowest':>10} {'algbw':>8} {'busbw':>8}"
)


@dataclass(frozen=True)
class Team:
    """The ranks that take part in an operation, and their barrier."""

    members: tuple[int, ...]  # ranks of the job
    rank: int  # this rank in the job
    device: torch.device
    group: Any = None  # of torch.distributed; None: all ranks

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        """This rank's number in the team."""
        return self.members.index(self.rank)

    def synchronise(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait until every member has arrived."""
        self.largest([0.0])

    def largest(self, values: list[float]) -> list[float]:
        """The maximum of each value over the members, the same on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()


@dataclass(frozen=True)
class Exchange:
    """One operation at one size, ready to be timed."""

    bytes: int
    prepare: Callable[[], object]  # before each run: an earlier result must not look right
    run: Callable[[], object]
    is_right: Callable[[], bool]


def exchange(operation: str, team: Team, size: int) -> Exchange:
    """Make one operation; its bytes are size rounded down to equal parts for the members."""
    ranks, index, group = team.size, team.index, team.group
    part = max(1, size // 4 // ranks)
    count = part * ranks

    def pattern(length: int) -> torch.Tensor:
        """0, 1, ... 250, 0, 1, ...: the values of rank 0; those of rank r are r more."""
        period = torch.arange(_PERIOD, dtype=torch.float32, device=team.device)
        return period.repeat(-(-length // _PERIOD))[:length]

    mine = slice(index * part, (index + 1) * part)
    source = pattern(part if operation == "all_gather" else count).add_(index)
    buffer = torch.empty(part if operation == "reduce_scatter" else count, device=team.device)
    # The backend may work in the input of a reduce_scatter; a copy keeps every run the same.
    scratch = torch.empty_like(source) if operation == "reduce_scatter" else source

    def swap() -> None:
        """Two ranks send to each other at once, as neighbours of a ring do."""
        other = team.members[1 - index]
        both = [
            dist.P2POp(dist.isend, source, other, group),
            dist.P2POp(dist.irecv, buffer, other, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def total() -> torch.Tensor:
        return pattern(count).mul_(ranks).add_(ranks * (ranks - 1) // 2)

    def parts(first: torch.Tensor) -> torch.Tensor:
        """A part of every rank, in their order."""
        return torch.cat([first + rank for rank in range(ranks)])

    runs: dict[str, tuple[Callable[[], object], Callable[[], torch.Tensor]]] = {
        "all_reduce": (lambda: dist.all_reduce(buffer, group=group), total),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(buffer, source, group=group),
            lambda: parts(pattern(part)),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(buffer, scratch, group=group),
            lambda: total()[mine],
        ),
        "broadcast": (
            lambda: dist.broadcast(buffer, team.members[0], group=group),
            lambda: pattern(count),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(buffer, source, group=group),
            lambda: parts(pattern(count)[mine]),
        ),
        "sendrecv": (swap, lambda: pattern(count).add_(1 - index)),
    }
    run, expected = runs[operation]

    def prepare() -> None:
        if operation in ("all_reduce", "broadcast"):  # in place
            buffer.copy_(source)
        else:
            buffer.zero_()
        if scratch is not source:
            scratch.copy_(source)

    return Exchange(count * 4, prepare, run, lambda: torch.equal(buffer, expected()))


def timed(operation: Exchange, team: Team, count: int) -> list[float]:
    """The seconds of each run, maximum over the members: the same on all of them.

    A barrier comes before each run, so that no time includes waiting for a late member; the device
    is synchronised around it. A latency so includes the launch of the operation.
    """
    taken = []
    for _ in range(count):
        operation.prepare()
        team.synchronise()
        team.barrier()
        start = time.perf_counter()
        operation.run()
        team.synchronise()
        taken.append(time.perf_counter() - start)
    return team.largest(taken)


def in_a_row(operation: Exchange, team: Team, count: int) -> float:
    """The seconds of one run of several that are issued one after the other.

    The device is synchronised after the last: no run waits for the host, as in nccl-tests.
    """
    operation.prepare()
    team.synchronise()
    team.barrier()
    start = time.perf_counter()
    for _ in range(count):
        operation.run()
    team.synchronise()
    (taken,) = team.largest([(time.perf_counter() - start) / count])
    return taken


def free_bytes(device: torch.device, ranks: int) -> int:
    """The free memory of the GPU, or on the CPU an even share for each rank of the node.

    The limit of a job or a container (its cgroup) is not read.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for text in Path("/proc/meminfo").read_text().splitlines():
        if text.startswith("MemAvailable:"):
            return int(text.split()[1]) * 1024 // ranks
    return 2**62  # an old kernel does not say


@dataclass(frozen=True)
class Timing:
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
    request: CommRequest
    report: Reporter

    def run(self) -> list[Sample]:
        """Measure every operation at every size, with a record each; every rank has the results.

        Raises UsageError, on every rank, where --max-bytes does not fit in memory.
        """
        sizes = self.sizes()
        self.report.say(HEAD)
        samples: list[Sample] = []
        for operation in self.request.operations:
            for scope, team in self.teams(operation):
                samples += self._sweep(operation, scope, team, sizes)
        return samples

    def sizes(self) -> list[int]:
        """The sizes that fit in the memory of the rank that has least."""
        request, group = self.request, self.group
        free = group.gather(free_bytes(group.device, group.place.local_world_size))
        least = min(free)
        fits = int(least * _SHARE / _COPIES)
        largest = request.max_bytes or max(DEFAULT_MAX_BYTES, request.min_bytes)
        if fits < largest:
            room = f"{_COPIES} buffers must fit in half of the {say_bytes(least)} that rank "
            room += f"{free.index(least)} has free, so that {say_bytes(fits)} is the most"
            if request.max_bytes or fits < request.min_bytes:
                raise UsageError(f"--max-bytes {say_bytes(largest)} is too much: {room}")
            self.report.warn(f"sizes end before {say_bytes(largest)}: {room}")
        return request.sizes(min(largest, fits))

    def teams(self, operation: str) -> Iterator[tuple[str, Team]]:
        """All ranks; for sendrecv the first two of a node, and the first of two nodes."""
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
        """The samples of one operation, up to a size that takes too long."""
        samples: list[Sample] = []
        nodes = self.group.place.nodes if scope == "all" else 1 + (scope == "inter_node")
        for size in sizes:
            mine = self._measure(operation, team, size) if team.rank in team.members else None
            timings: list[Timing | None] = self.group.gather(mine)  # the others wait here
            first = timings[0]
            assert first is not None  # rank 0 is in every team
            if first.lacks:
                self.report.warn(f"{operation} is skipped: {first.lacks}")
                break
            right = all(timing.right for timing in timings if timing)
            result = sample(operation, scope, team.size, nodes, first.bytes, first.times, right)
            result = replace(result, pipelined_time_s=first.pipelined)
            samples.append(result)
            self.report.record("comm", **asdict(result))
            self.report.say(line(result))
            if result.time_s > self.request.seconds_per_size and size < sizes[-1]:
                self.report.warn(
                    f"{operation} stops at {say_bytes(size)}: it takes "
                    f"{say_seconds(result.time_s)}, and --seconds-per-size is "
                    f"{self.request.seconds_per_size:g}"
                )
                break
        return samples

    def _measure(self, operation: str, team: Team, size: int) -> Timing:
        """Time one operation at one size, and check what the last iteration left."""
        tried, request = exchange(operation, team, size), self.request
        try:
            (first_s,) = timed(tried, team, 1)  # it connects the ranks, too
        except (RuntimeError, NotImplementedError) as error:
            if any(word in str(error).lower() for word in _LACKS):
                return Timing(lacks=str(error).strip().splitlines()[0][:200])
            raise
        room = request.seconds_per_size
        warm = timed(tried, team, max(1, min(request.warmup - 1, int(room / first_s))))
        count = max(_MIN_TIMED, min(request.iterations, int(room / min(warm))))
        times = timed(tried, team, min(count, request.iterations))
        right = tried.is_right()
        # On the CPU an operation is done when its call returns: nothing is in flight.
        on_gpu = team.device.type == "cuda"
        pipelined = in_a_row(tried, team, len(times)) if on_gpu else None
        return Timing(tried.bytes, tuple(times), right, pipelined=pipelined)


def line(result: Sample) -> str:
    """One result for people, under HEAD."""
    times = (say_seconds(t) for t in (result.time_s, result.time_low_s, result.time_high_s))
    return (
        f"{result.operation:<15} {result.ranks:>5}  {result.scope:<10}"
        f" {say_bytes(result.bytes):>9} {' '.join(f'{text:>10}' for text in times)}"
        f" {result.algorithm_gb_per_s:>8.4f} {result.bus_gb_per_s:>8.4f} GB/s"
        f"{'' if result.correct else '  WRONG RESULT'}"
    )


def measure(request: CommRequest, place: RankEnv, paths: RunPaths, attempt: int) -> None:
    """Measure as one rank, and write comm.csv, comm.json, records and the outcome.

    Raises UsageError for bad input, and RuntimeError for a wrong result.
    """
    report = Reporter(paths, attempt, place.rank)
    try:
        check_ranks(place.world_size)
        threads = share_of_cores(place.local_world_size)
        torch.set_num_threads(threads)
        if request.backend == "nccl" and torch.cuda.device_count() == 0:
            raise UsageError(
                "--backend nccl: no GPU is visible here; say --backend gloo, or ask for GPUs"
            )
        # The CPU for Gloo, the rank's GPU for NCCL.
        wanted = {"auto": "auto", "gloo": "cpu", "nccl": "cuda"}[request.backend]
        group = join(wanted, place, request.timeout_s, report.warn)
        check_identity(group, paths.folder.name, attempt)
        for text in banner(group, threads):
            report.say(text)
        about = _about(group, threads)
        report.record("run_start", **about)
        samples = Bench(group, request, report).run()
        if not samples:
            raise RuntimeError("nothing was measured: the backend has none of these operations")
        write(samples, about, report, paths, place.rank)
        report.record("run_end", status="ok", reason="", total_time_s=process_age_s())
        if place.rank == 0:
            write_outcome(paths, attempt, "ok", 0)
        report.say(f"wrote {paths.comm_csv} and {paths.comm_json.name}")
        report.say(f"next: python -m jobkit plot-comm {paths.folder}")
        dist.barrier()  # rank 0 may serve the store that the others end with
        group.close()
    except Exception as error:
        # The first rank that records why it failed is right.
        code = Exit.USAGE if isinstance(error, UsageError) else Exit.FAILED
        reason = str(error) if code == Exit.USAGE else f"rank {place.rank}: {error}"
        reason = write_outcome(paths, attempt, "failed", code, reason)[:500]
        report.record("run_end", status="failed", reason=reason, total_time_s=process_age_s())
        raise
    finally:
        report.close()


def write(
    samples: Sequence[Sample],
    about: dict[str, Any],
    report: Reporter,
    paths: RunPaths,
    rank: int,
) -> None:
    """Write the files; raises RuntimeError where a result was wrong."""
    lines = comm.fit_lines(samples)
    report.say("fitted: time = latency + bytes / bandwidth")
    for fit in lines:
        report.say(
            f"{fit.operation:<15} {fit.ranks:>5}  {fit.scope:<10} latency "
            f"{say_seconds(fit.latency_s)}, bandwidth {fit.gb_per_s:.3g} GB/s; "
            f"largest error of a size {fit.worst_share:.0%}"
        )
    if rank == 0:
        write_whole(paths.comm_csv, comm.to_csv(samples))
        write_json(paths.comm_json, comm.to_json(about, lines))
    if wrong := [f"{s.operation} of {s.bytes} bytes" for s in samples if not s.correct]:
        raise RuntimeError(f"wrong result: {', '.join(wrong[:5])}")


def _about(group: Group, threads: int) -> dict[str, Any]:
    """Where it is measured: fields of run_start."""
    place = group.place
    hosts = group.gather(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    return {
        "world_size": place.world_size,
        "nodes": place.nodes,
        "node_list": ",".join(dict.fromkeys(hosts)),
        "device": device_name(group.device),
        "device_type": group.device.type,
        "backend": group.backend,
        "versions": versions(group.device),
        "git_commit": git_commit() if place.rank == 0 else None,
        "job_id": place.job_id,
        "threads": threads,
    }
