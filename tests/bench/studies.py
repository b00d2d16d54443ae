"""A study of thousands of runs: seconds to plan, submit, look at, collect and plot it.

Each is a process of its own.

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
import textwrap
from pathlib import Path

from bench import ROOT, Figures, report

PLAIN = "2026-01-01 12:00:00 rank 0 INFO iteration {:5} of 4000: loss 1.2345, 3645 images/s, lr 0\n"
RUNS, BYTES_OF_LOG = 10_000, 20_000
MARKS = {"plan": 5, "submit": 60, "status": 2, "collect": 15, "plot": 10}  # seconds, of RUNS
MOST_MIB = 1024
SBATCH = "#!/bin/sh\ncat > /dev/null\necho $$\n"
# What each step runs, of a study of this name and so many runs.
PLAN = """
from jobkit.spec.study import Study
shapes = {"strategies": ("ddp", "fsdp"), "gpus": (1, 2, 4, 8, 16)}
Study(name=name, **shapes, repeats=-(-runs // 10)).expand().save()
"""
SUBMIT = """
from jobkit.launch.launcher import launch
from jobkit.launch.command import LaunchRequest
from jobkit.spec.study import find_study, read_plan
launch(read_plan(find_study(name)),
       LaunchRequest(site="slurm", gpu_request="none", options={"hold": True}))
"""
STATUS = "from jobkit.launch.status import main; main([name])"
COLLECT = "from jobkit.analysis.collect import collect; collect(name)"
PLOT = "from jobkit.analysis.cli import plot_main; plot_main([name])"
AROUND = """
import contextlib, io, json, resource, sys, time
begin, used = time.monotonic(), time.process_time()
name, runs = sys.argv[1], int(sys.argv[2])
with contextlib.redirect_stdout(io.StringIO()):
    {}
seconds, used = time.monotonic() - begin, time.process_time() - used
whose = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
used += whose[1].ru_utime + whose[1].ru_stime
peak = max(one.ru_maxrss for one in whose) / 1024
print(json.dumps({{"seconds": seconds, "cpu_s": used, "peak_mib": peak}}))
"""


def write_study(name: str, runs: int, size: int) -> None:
    """A study of so many runs and bytes of logs; every tenth line of a log is a record."""
    from support import fake_study

    shapes = {"strategies": ("ddp", "fsdp"), "gpus": (1, 2, 4, 8, 16)}
    plan = fake_study.make_plan(name, **shapes, repeats=-(-runs // 10))
    plain = "".join(PLAIN.format(i) for i in range(9))
    for run_id in list(plan.runs):
        run = fake_study.FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin()
        print_plain = run.print
        run.print = lambda _, text=plain, put=print_plain: put(text[:-1])
        epoch, lines = 0, 400 + len(plain)
        while run.writer._log.tell() < size // runs - lines:
            run.train(epoch)
            epoch += 1
        run.end()


def measure(what: str, code: str, name: str, runs: int) -> Figures:
    """Run one step in a process of its own, imports included, and print what it took."""
    program = AROUND.format(textwrap.indent(code, " " * 4))
    words = [sys.executable, "-c", program, name, str(runs)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    took = json.loads(done.stdout.splitlines()[-1])
    return {
        f"{what}, s": took["seconds"],
        f"{what}, s of a processor": took["cpu_s"],
        f"{what}, MiB": took["peak_mib"],
    }


def stand_in(folder: Path) -> None:
    """A Slurm that takes every job and knows none of them afterwards; sets the environment."""
    for name, text in {"sbatch": SBATCH, "squeue": "#!/bin/sh\n", "sacct": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "slurm.conf").write_text("ClusterName=bench\nMaxArraySize=1001\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as base:
        slurm = Path(base) / "slurm"
        slurm.mkdir()
        os.environ |= {"JOBKIT_LOGS": base, "PYTHONPATH": str(ROOT / "src")}
        stand_in(slurm)
        figures = measure("plan", PLAN, "planned", runs)
        figures |= measure("submit", SUBMIT, "planned", runs)
        write_study("done", runs, runs * BYTES_OF_LOG)
        figures |= measure("status", STATUS, "done", runs)
        figures |= measure("collect", COLLECT, "done", runs)
        figures |= measure("plot", PLOT, "done", runs)
    limits = {f"{what}, s": mark for what, mark in MARKS.items()} if runs == RUNS else {}
    return report(figures, at_most=limits | {f"{what}, MiB": MOST_MIB for what in MARKS})


if __name__ == "__main__":
    sys.exit(main())
