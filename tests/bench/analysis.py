"""`make bench`: how fast a study is collected and its report made, beside what grep -c takes.

A study is generated in a temporary folder: real plan, real records, and plain lines between them.
Every figure is a median over rounds in which the ways alternate; each runs in a process of its
own, on one core, and tells its peak memory. Seconds are the processor's, so that other work on the
machine does not count; the logs lie in the page cache. Without metrics/ the log alone is read.

    python tests/bench/analysis.py                              10,000 runs and 1 GB of logs
    python tests/bench/analysis.py --runs 100 --megabytes 10    in seconds
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
PLAIN = "2026-01-01 12:00:00 rank 0 INFO iteration {:5} of 4000: loss 1.2345, 3645 images/s, lr 0\n"
TARGETS = {"times grep": 6, "report s": 20}
READ = """
from jobkit.analysis.collect.records import read_run
from jobkit.analysis.collect.study import read_study
def work(folder):
    study = read_study(folder)
    return sum(len(read_run(p, study.record_ids[k]).records) for k, p in study.folders.items())
"""
COLLECT = """
from jobkit.analysis.collect import collect
def work(folder):
    return len(collect(folder).epochs)
"""
REPORT = """
from jobkit.analysis.collect import collect
from jobkit.analysis.figures.draw import draw
from jobkit.analysis.report.report import write_report
def work(folder):
    results = collect(folder, write=False)
    return len(write_report(results, draw(results).paths))
"""
AROUND = """
import json, os, resource, sys, time
from pathlib import Path
{}
os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
begin = time.process_time()
count = work(Path(sys.argv[1]))
seconds = time.process_time() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"seconds": seconds, "peak_mib": peak, "count": count}}))
"""


def write_study(name: str, runs: int, size: int, every: int) -> Path:
    """A study of so many runs and bytes of logs; of every lines of a log one is a record."""
    from support import fake_study

    shapes = {"strategies": ("ddp", "fsdp"), "gpus": (1, 2, 4, 8, 16)}
    plan = fake_study.make_plan(name, **shapes, repeats=-(-runs // 10))
    plain = "".join(PLAIN.format(i) for i in range(every - 1))
    for run_id in list(plan.runs):
        run = fake_study.FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin()
        print_plain = run.print
        run.print = lambda _, text=plain, put=print_plain: put(text[:-1])
        epoch, lines = 0, 400 + len(plain)
        while run.writer._log.tell() < size // runs - lines:
            run.train(epoch)
            epoch += 1
        run.end()
    return plan.paths.folder


def measure(code: str, folder: Path) -> dict[str, float]:
    """Seconds, peak memory and what was counted, by a process that runs the code alone."""
    words = [sys.executable, "-c", AROUND.format(code), str(folder)]
    done = subprocess.run(words, stdout=-1, check=True, env={**os.environ, "PYTHONPATH": "src"})
    return json.loads(done.stdout)


def grep(folder: Path) -> dict[str, float]:
    """Seconds that grep takes to count the tagged lines of all logs."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["grep", "-rch", "--include=train.log", "METRIC]", str(folder)]
    done = subprocess.run(words, stdout=-1, check=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    return {"seconds": seconds, "count": sum(map(int, done.stdout.split()))}


def rounds(folder: Path, number: int, ways: dict[str, str]) -> dict[str, dict[str, float]]:
    """Medians of each way; grep stands in every round beside them."""
    found: dict[str, list[dict[str, float]]] = {"grep -c": []}
    for _ in range(number):
        found["grep -c"].append(grep(folder))
        for way, code in ways.items():
            found.setdefault(way, []).append(measure(code, folder))
    return {w: {k: median(r[k] for r in rs) for k in rs[0]} for w, rs in found.items()}


def show(title: str, folder: Path, found: dict[str, dict[str, float]]) -> None:
    """A line for each way: rate, times what grep takes, peak memory."""
    size = sum(p.stat().st_size for p in folder.glob("*/train.log")) / 1e6
    least = found["grep -c"]["seconds"]
    print(f"{title}: {size:,.0f} MB of logs, {found['grep -c']['count']:,.0f} records in them")
    for way, one in found.items():
        rate, ratio = size / one["seconds"], one["seconds"] / least
        print(f"  {way:<10} {one['seconds']:8.2f} s {rate:8,.0f} MB/s {ratio:7.1f} x grep", end="")
        print(f" {one['peak_mib']:8,.0f} MiB at most" if "peak_mib" in one else "")
    read = found["read"]
    ratio = read["seconds"] / least
    verdict("read: times grep", ratio, TARGETS["times grep"], ratio <= TARGETS["times grep"])


def verdict(what: str, value: float, target: float, reached: bool) -> None:
    print(f"  {what:<20} {value:8.1f}  to reach {target}: {'reached' if reached else 'missed'}")


def plain_lines_cost(base: Path, args: argparse.Namespace) -> None:
    """Peak memory with ten times the plain lines, for about as many records: it must not grow."""
    peaks = []
    for every in (10, 100):
        size = args.megabytes * 10**5 * (every // 10)
        folder = write_study(f"plain-{every}", max(10, args.runs // 100), size, every)
        found = measure(COLLECT, folder)
        peaks.append(found["peak_mib"])
        print(f"one line in {every} a record: {found['count']:,.0f} epochs, {peaks[-1]:,.0f} MiB")
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--megabytes", type=int, default=1000, help="of logs, in all runs")
    parser.add_argument("--every", type=int, default=10, help="one line in so many is a record")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report-runs", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as base:
        os.environ["JOBKIT_LOGS"] = base
        folder = write_study("both", args.runs, args.megabytes * 10**6, args.every)
        ways = {"read": READ, "collect": COLLECT}
        show("logs and metrics/", folder, rounds(folder, args.rounds, ways))
        for run in folder.glob("*/metrics"):
            shutil.rmtree(run)
        show("logs alone", folder, rounds(folder, args.rounds, ways))
        shutil.rmtree(folder)
        plain_lines_cost(Path(base), args)
        folder = write_study("report", args.report_runs, args.report_runs * 10_000, args.every)
        seconds = median(measure(REPORT, folder)["seconds"] for _ in range(args.rounds))
        reached = seconds <= TARGETS["report s"]
        verdict(f"report, {args.report_runs} runs: s", seconds, TARGETS["report s"], reached)


if __name__ == "__main__":
    main()
