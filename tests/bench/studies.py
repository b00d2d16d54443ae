"""A study of thousands of runs: seconds to plan, submit, look at and collect it, each in a process.

It is collected a second time after ten runs have changed.

Slurm is a stand-in: an sbatch that answers with a number, and a squeue that knows no job, so that
the seconds are jobkit's own. The marks are for seconds on an idle machine of two cores, and for the
memory of the largest process; a processor's seconds say more where other load is. The runs that are
collected have real records and plain lines.

    python tests/bench/studies.py                10,000 runs, 20 kB of log each
    python tests/bench/studies.py --runs 1000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import analysis

ROOT = Path(__file__).resolve().parents[2]
RUNS, BYTES_OF_LOG, CHANGED = 10_000, 20_000, 10
MARKS = {"plan": 5, "submit": 60, "status": 2, "collect": 10, "again": 2}  # seconds, of RUNS
MOST_MIB = 1024
SBATCH = "#!/bin/sh\ncat > /dev/null\necho $$\n"
PLAN = """
from jobkit.launch.launcher import save
from jobkit.spec.plan import Study
def work(name, runs):
    shapes = {"strategies": ("ddp", "fsdp"), "gpus": (1, 2, 4, 8, 16)}
    plan = Study(name=name, **shapes, repeats=-(-runs // 10)).expand()
    save(plan)
    return len(plan.runs)
"""
SUBMIT = """
from jobkit.launch.launcher import launch
from jobkit.launch.request import LaunchRequest
from jobkit.spec.studies import find_study, read_plan
def work(name, runs):
    request = LaunchRequest(site="slurm", gpu_request="none", options={"hold": True})
    return len(launch(read_plan(find_study(name)), request).run_ids)
"""
STATUS = """
import contextlib, io
from jobkit.launch.follow.status import main
def work(name, runs):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main([name])
    return len(shown.getvalue().splitlines())
"""
COLLECT = """
from jobkit.analysis.collect import collect
def work(name, runs):
    return len(collect(name).runs)
"""
AROUND = """
import json, resource, sys, time
begin, used = time.monotonic(), time.process_time()
{}
count = work(sys.argv[1], int(sys.argv[2]))
seconds, used = time.monotonic() - begin, time.process_time() - used
whose = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
used += whose[1].ru_utime + whose[1].ru_stime
peak = max(one.ru_maxrss for one in whose) / 1024
print(json.dumps({{"seconds": seconds, "cpu_s": used, "peak_mib": peak, "count": count}}))
"""


def measure(what: str, code: str, name: str, runs: int) -> None:
    """Run one step in a process of its own, imports included, and print what it took."""
    words = [sys.executable, "-c", AROUND.format(code), name, str(runs)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    took = json.loads(done.stdout.splitlines()[-1])
    mark = MARKS[what]
    reached = took["seconds"] <= mark and took["peak_mib"] <= MOST_MIB
    said = "reached" if reached else "missed"
    verdict = f"at most {mark} s, {MOST_MIB:,} MiB: {said}"
    print(
        f"{what:<8} {took['seconds']:8.1f} s {took['cpu_s']:8.1f} s of a processor "
        f"{took['peak_mib']:6,.0f} MiB  {verdict if runs == RUNS else ''}".rstrip(),
        flush=True,
    )


def stand_in(folder: Path) -> None:
    """A Slurm that takes every job and knows none of them afterwards; sets the environment."""
    for name, text in {"sbatch": SBATCH, "squeue": "#!/bin/sh\n", "sacct": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "slurm.conf").write_text("ClusterName=bench\nMaxArraySize=1001\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as base:
        slurm = Path(base) / "slurm"
        slurm.mkdir()
        os.environ |= {"JOBKIT_LOGS": base, "PYTHONPATH": str(ROOT / "src")}
        stand_in(slurm)
        measure("plan", PLAN, "planned", args.runs)
        measure("submit", SUBMIT, "planned", args.runs)
        analysis.write_study("done", args.runs, args.runs * BYTES_OF_LOG, 10)
        measure("status", STATUS, "done", args.runs)
        measure("collect", COLLECT, "done", args.runs)
        for log in sorted((Path(base) / "done").glob("*/train.log"))[:CHANGED]:
            with log.open("a") as file:
                file.write("one more line\n")
        measure("again", COLLECT, "done", args.runs)


if __name__ == "__main__":
    main()
