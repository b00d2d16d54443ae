"""The ranks of the communication benchmark: operations, their checks, timing, records, files.

Buffers are float32 and hold whole numbers below 2^24, so that a right sum is exact. A value
encodes its rank and its place, so that a part in the wrong place is detected.
"""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobkit.errors import Exit, UsageError
from jobkit.metric import comm
from jobkit.metric.comm import Sample, sample
from jobkit.paths import RunPaths, write_json, write_whole
from jobkit.payload.device import process_age_s, start_fields
from jobkit.payload.distributed import Group, banner, check_identity, join
from jobkit.payload.place import RankEnv, share_of_cores
from jobkit.payload.report import Reporter, write_outcome
from jobkit.program.process import synchronised_s
from jobkit.units import say_bytes, say_seconds

_DEFAULT_MAX_BYTES, _FACTOR = 2**30, 4  # the factor: of a size to the one before
_PERIOD = 251  # of the pattern: a prime, so that it fits no power of two
_COPIES = 4  # of a size that an operation may hold at once, its check included
_SHARE = 0.5  # of the memory that is free: the rest is for the backend and other programs
_ITERATIONS, _MAX_S = 20, 1.0  # timed at one size: fewer where they take longer, at least three
_TIMEOUT_S = 300.0  # of a collective
HEAD = (
    f"{'operation':<15} {'ranks':>5}  {'where':<10} {'size':>9} {'time':>10} {'fastest':>10}"
    f" {'slowest':>10} {'algbw':>8} {'busbw':>8}"
)


class Exchange:
    """One operation at one size between some ranks; its bytes are rounded down to equal parts."""

    def __init__(
        self, operation: str, size: int, ranks: Sequence[int], rank: int, device: torch.device,
        group: Any = None,
    ) -> None:  # fmt: skip
        """ranks: of the job, that take part; group: theirs, None for all ranks."""
        self.operation, self.device, self.group = operation, device, group
        self.ranks, self.index = len(ranks), ranks.index(rank)
        self.part = max(1, size // 4 // self.ranks)
        self.count = self.part * self.ranks
        self.bytes = 4 * self.count
        self.source = self.first(self.part if operation == "all_gather" else self.count)
        self.source += self.index
        length = self.part if operation == "reduce_scatter" else self.count
        self.buffer = torch.empty(length, device=device)
        # The backend may work in the input of a reduce_scatter; a copy keeps every run the same.
        self.scratch = self.source.clone() if operation == "reduce_scatter" else self.source
        self.other = ranks[1 - self.index] if operation == "sendrecv" else -1

    def first(self, length: int) -> torch.Tensor:
        """0, 1, ... 250, 0, 1, ...: the values of the first rank; those of the next are 1 more."""
        period = torch.arange(_PERIOD, dtype=torch.float32, device=self.device)
        return period.repeat(-(-length // _PERIOD))[:length]

    def prepare(self) -> None:
        """Fill the buffers, so that an earlier result does not look right."""
        if self.operation in ("all_reduce", "broadcast"):  # in place
            self.buffer.copy_(self.source)
        else:
            self.buffer.zero_()
        self.scratch.copy_(self.source)

    def run(self) -> None:
        match self.operation:
            case "all_reduce":
                dist.all_reduce(self.buffer, group=self.group)
            case "all_gather":
                dist.all_gather_into_tensor(self.buffer, self.source, group=self.group)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(self.buffer, self.scratch, group=self.group)
            case "broadcast":
                dist.broadcast(self.buffer, 0, group=self.group)
            case "all_to_all":
                dist.all_to_all_single(self.buffer, self.source, group=self.group)
            case "sendrecv":  # two ranks send to each other at once, as neighbours of a ring do
                send = dist.P2POp(dist.isend, self.source, self.other, self.group)
                receive = dist.P2POp(dist.irecv, self.buffer, self.other, self.group)
                for work in dist.batch_isend_irecv([send, receive]):
                    work.wait()

    def is_right(self) -> bool:
        """Whether the buffer has the right result in every place."""
        right = self.first(self.part if self.operation == "all_gather" else self.count)
        if self.operation in ("reduce_scatter", "all_to_all"):  # this rank's part
            right = right[self.index * self.part :][: self.part]
        if self.operation in ("all_reduce", "reduce_scatter"):
            right = right * self.ranks + self.ranks * (self.ranks - 1) // 2
        elif self.operation in ("all_gather", "all_to_all"):  # a part of every rank, in order
            right = torch.cat([right + rank for rank in range(self.ranks)])
        elif self.operation == "sendrecv":
            right = right + (1 - self.index)
        return torch.equal(self.buffer, right)

    def timed(self, count: int) -> list[float]:
        """The seconds of each run, maximum over the ranks: the same on all of them.

        A barrier comes before each run, so that no time includes waiting for a late rank; the
        device is synchronised around it. A latency so includes the launch of the operation.
        """
        taken = []
        for _ in range(count):
            self.prepare()
            self.largest([0.0])  # a barrier
            start = synchronised_s()
            self.run()
            taken.append(synchronised_s() - start)
        return self.largest(taken)

    def largest(self, values: list[float]) -> list[float]:
        """The maximum of each value over the ranks, the same on all of them."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def measure(self) -> tuple[list[float], bool]:
        """The seconds of each timed run, and whether the last result is right on every rank."""
        (first_s,) = self.timed(1)  # it connects the ranks, too
        warm = self.timed(max(1, min(2, int(_MAX_S / first_s))))
        times = self.timed(min(_ITERATIONS, max(3, int(_MAX_S / min(warm)))))
        (wrong,) = self.largest([float(not self.is_right())])
        return times, not wrong


def sizes_that_fit(
    min_bytes: int, max_bytes: int | None, free: Sequence[int]
) -> tuple[list[int], str]:
    """The sizes that fit in the memory of each rank, and why they end early; free: of each rank.

    Raises UsageError where --max-bytes does not fit.
    """
    fits = int(min(free) * _SHARE / _COPIES)
    largest, why = max_bytes or max(_DEFAULT_MAX_BYTES, min_bytes), ""
    if fits < largest:
        room = f"{_COPIES} buffers must fit in half of the {say_bytes(min(free))} that rank "
        room += f"{free.index(min(free))} has free, so that {say_bytes(fits)} is the most"
        if max_bytes or fits < min_bytes:
            raise UsageError(f"--max-bytes {say_bytes(largest)} is too much: {room}")
        why = f"sizes end before {say_bytes(largest)}: {room}"
    sizes = [min_bytes]
    while sizes[-1] * _FACTOR <= min(largest, fits):
        sizes.append(sizes[-1] * _FACTOR)
    return sizes, why


def teams(operation: str, place: RankEnv) -> dict[str, list[int]]:
    """All ranks; for sendrecv the first two of a node, and the first of two nodes."""
    if operation != "sendrecv":
        return {"all": list(range(place.world_size))}
    pairs = {"intra_node": [0, 1]} if place.local_world_size > 1 else {}
    return pairs | ({"inter_node": [0, place.local_world_size]} if place.nodes > 1 else {})


def measure_all(group: Group, report: Reporter, args: argparse.Namespace) -> list[Sample]:
    """Measure every operation at every size, with a record each, on the ranks that take part.

    Raises, on every rank, UsageError where --max-bytes does not fit in memory, and RuntimeError
    where the backend lacks all operations.
    """
    place, samples = group.place, []
    free = group.gather(free_bytes(group.device, place.local_world_size))
    sizes, why = sizes_that_fit(args.min_bytes, args.max_bytes, free)
    if why:
        report.warn(why)
    report.say(HEAD)
    for operation in dict.fromkeys(args.ops):
        for scope, ranks in teams(operation, place).items():
            # Every rank must call this.
            inner = None if scope == "all" else dist.new_group(ranks, timeout=group.timeout)
            nodes = place.nodes if scope == "all" else 1 + (scope == "inter_node")
            for size in sizes:
                ends = False
                if place.rank in ranks:
                    tried = Exchange(operation, size, ranks, place.rank, group.device, inner)
                    done = measure_size(tried, scope, nodes, report)
                    samples += [done] if done else []
                    ends = done is None or (done.time_s > _MAX_S and size < sizes[-1])
                    if done and ends:
                        took = say_seconds(done.time_s)
                        report.warn(f"{operation} stops at {say_bytes(size)}, which takes {took}")
                # Ranks outside a pair wait here at each size: all sizes might be a timeout.
                if any(group.gather(ends)):
                    break
    if not any(group.gather(bool(samples))):
        raise RuntimeError("no operation is available")
    return samples


def measure_size(tried: Exchange, scope: str, nodes: int, report: Reporter) -> Sample | None:
    """Measure an operation at one size, with a record; None where the backend lacks it."""
    try:
        times, right = tried.measure()
    except RuntimeError as error:
        if " does not support " not in str(error):  # as torch says it of a backend, on every rank
            raise
        report.warn(f"{tried.operation} is not available: {str(error).splitlines()[0]}")
        return None
    done = sample(tried.operation, scope, tried.ranks, nodes, tried.bytes, times, right)
    report.record("comm", **asdict(done))
    report.say(line(done))
    return done


def free_bytes(device: torch.device, ranks: int) -> int:
    """The free memory of the GPU, or on the CPU an even share for each rank of the node.

    The limit of a job or a container (its cgroup) is not read.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Some containers' file lacks it; what the system says is without what caches would give back.
    available = re.search(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (int(available[1]) * 1024 if available else pages) // ranks


def line(result: Sample) -> str:
    times = (say_seconds(t) for t in (result.time_s, result.time_low_s, result.time_high_s))
    return (
        f"{result.operation:<15} {result.ranks:>5}  {result.scope:<10}"
        f" {say_bytes(result.bytes):>9} {' '.join(f'{text:>10}' for text in times)}"
        f" {result.algorithm_gb_per_s:>8.4f} {result.bus_gb_per_s:>8.4f} GB/s"
        f"{'' if result.correct else '  WRONG RESULT'}"
    )


def measure(place: RankEnv, paths: RunPaths, args: argparse.Namespace) -> None:
    """Measure as one rank, and write comm.csv, comm.json, records and the outcome.

    args: those of comm.py. Raises UsageError for bad input, and RuntimeError for a wrong result.
    """
    report = Reporter(paths, args.attempt, place.rank)
    try:
        threads = share_of_cores(place.local_world_size)
        torch.set_num_threads(threads)
        if args.backend == "nccl" and torch.cuda.device_count() == 0:
            raise UsageError(
                "--backend nccl: no GPU is visible here; say --backend gloo, or ask for GPUs"
            )
        # The CPU for Gloo, the rank's GPU for NCCL.
        wanted = {"auto": "auto", "gloo": "cpu", "nccl": "cuda"}[args.backend]
        group = join(wanted, place, _TIMEOUT_S, report.warn)
        check_identity(group, paths.folder.name, args.attempt)
        for text in banner(group, threads):
            report.say(text)
        about = start_fields(group, threads)
        report.record("run_start", **about)
        samples = measure_all(group, report, args)
        dist.barrier()  # ranks that are of no pair wait for those that are
        write(samples, about, report, paths, place.rank)
        report.record("run_end", status="ok", reason="", total_time_s=process_age_s())
        if place.rank == 0:
            write_outcome(paths, args.attempt, "ok", 0)
        report.say(f"wrote {paths.comm_csv} and {paths.comm_json.name}")
        dist.barrier()  # rank 0 may serve the store that the others end with
        group.close()
    except Exception as error:
        # The first rank that records why it failed is right.
        code = Exit.USAGE if isinstance(error, UsageError) else Exit.FAILED
        reason = str(error) if code == Exit.USAGE else f"rank {place.rank}: {error}"
        reason = write_outcome(paths, args.attempt, "failed", code, reason)[:500]
        report.record("run_end", status="failed", reason=reason, total_time_s=process_age_s())
        raise
    finally:
        report.close()


def write(
    samples: Sequence[Sample], about: dict[str, Any], report: Reporter, paths: RunPaths, rank: int
) -> None:
    """Write the files; raises RuntimeError where a result was wrong."""
    report.say("fitted: time = latency + bytes / bandwidth")
    for fit in comm.fit_lines(samples):
        report.say(
            f"{fit.operation:<15} {fit.ranks:>5}  {fit.scope:<10} latency "
            f"{say_seconds(fit.latency_s)}, bandwidth {fit.gb_per_s:.3g} GB/s; "
            f"largest error of a size {fit.worst_share:.0%}"
            + ": not usable for a forecast"
            * fit.is_bad
        )
    if rank == 0:
        write_whole(paths.comm_csv, comm.to_csv(samples))
        write_json(paths.comm_json, about)
    if wrong := [f"{s.operation} of {s.bytes} bytes" for s in samples if not s.correct]:
        raise RuntimeError(f"wrong result: {', '.join(wrong[:5])}")
