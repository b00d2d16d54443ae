"""One rank of the communication benchmark: group, measurement, records, files, outcome."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jobkit.checks.comm.bench import Bench
from jobkit.checks.comm.request import Request, check_ranks
from jobkit.errors import Exit, UsageError
from jobkit.metric import comm
from jobkit.paths import RunPaths, write_json, write_whole
from jobkit.payload import host
from jobkit.payload.distributed import Group, banner, check_identity, join
from jobkit.payload.place import RankEnv, share_of_cores
from jobkit.payload.report import Reporter, write_outcome
from jobkit.units import say_seconds


@dataclass(frozen=True)
class Participant:
    """A rank of the benchmark, and what it is to measure."""

    request: Request
    place: RankEnv
    paths: RunPaths
    attempt: int

    def run(self) -> None:
        """Measure, and write comm.csv, comm.json, records and the outcome.

        Raises UsageError for bad input, and RuntimeError for a wrong result.
        """
        report = Reporter(self.paths, self.attempt, self.place.rank)
        try:
            self._measure(report)
        except Exception as error:
            self._record_failure(report, error)
            raise
        finally:
            report.close()

    def _measure(self, report: Reporter) -> None:
        check_ranks(self.place.world_size)
        threads = share_of_cores(self.place.local_world_size)
        torch.set_num_threads(threads)
        if self.request.backend == "nccl" and torch.cuda.device_count() == 0:
            raise UsageError(
                "--backend nccl: no GPU is visible here; say --backend gloo, or ask for GPUs"
            )
        # The CPU for Gloo, the rank's GPU for NCCL.
        wanted = {"auto": "auto", "gloo": "cpu", "nccl": "cuda"}[self.request.backend]
        group = join(wanted, self.place, self.request.timeout_s, report.warn)
        check_identity(group, self.paths.folder.name, self.attempt)
        for text in banner(group, threads):
            report.say(text)
        about = _about(group, threads)
        report.record("run_start", **about)
        found = Bench(group, self.request, report).run()
        if not found:
            raise RuntimeError("nothing was measured: the backend has none of these operations")
        self._write(report, about, found)
        dist.barrier()  # rank 0 may serve the store that the others end with
        group.close()

    def _write(self, report: Reporter, about: dict[str, Any], found: Sequence[comm.Sample]) -> None:
        """Write the files and the last record; raises RuntimeError where a result was wrong."""
        lines = comm.fit_lines(found)
        for text in fit_table(lines):
            report.say(text)
        if self.place.rank == 0:
            write_whole(self.paths.comm_csv, comm.to_csv(found))
            write_json(self.paths.comm_json, comm.to_json(about, lines))
        if wrong := [f"{s.operation} of {s.bytes} bytes" for s in found if not s.correct]:
            raise RuntimeError(f"wrong result: {', '.join(wrong[:5])}")
        report.record("run_end", status="ok", reason="", total_time_s=host.process_age_s())
        if self.place.rank == 0:
            write_outcome(self.paths, self.attempt, "ok", 0)
        report.say(f"wrote {self.paths.comm_csv} and {self.paths.comm_json.name}")
        report.say(f"next: python -m jobkit plot-comm {self.paths.folder}")

    def _record_failure(self, report: Reporter, error: Exception) -> None:
        """Record that the benchmark failed and why; the first rank to do so is right."""
        code = Exit.USAGE if isinstance(error, UsageError) else Exit.FAILED
        reason = str(error) if code == Exit.USAGE else f"rank {self.place.rank}: {error}"
        reason = write_outcome(self.paths, self.attempt, "failed", code, reason)
        report.record(
            "run_end", status="failed", reason=reason[:500], total_time_s=host.process_age_s()
        )


def _about(group: Group, threads: int) -> dict[str, Any]:
    """Return where it is measured: fields of run_start."""
    place = group.place
    hosts = group.gather(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    return {
        "world_size": place.world_size,
        "nodes": place.nodes,
        "node_list": ",".join(dict.fromkeys(hosts)),
        "device": host.device_name(group.device),
        "device_type": group.device.type,
        "backend": group.backend,
        "versions": host.versions(group.device),
        "git_commit": host.git_commit() if place.rank == 0 else None,
        "job_id": place.job_id,
        "threads": threads,
    }


def fit_table(lines: Sequence[comm.Line]) -> list[str]:
    """Return the fitted lines for people."""
    made = ["fitted: time = latency + bytes / bandwidth"]
    for one in lines:
        made.append(
            f"{one.operation:<15} {one.ranks:>5}  {one.scope:<10} latency "
            f"{say_seconds(one.latency_s)}, bandwidth {one.gb_per_s:.3g} GB/s; "
            f"largest error of a size {one.worst_share:.0%}"
        )
    return made
