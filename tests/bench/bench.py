"""`make bench`: benchmarks of this folder, and what was lost since figures that were saved.

    python tests/bench/bench.py --list
    python tests/bench/bench.py --only throughput peers --save before.json
    python tests/bench/bench.py --only throughput --against before.json

Each benchmark is a program of its own, which prints its tables and, as its last line, its figures
as JSON; see report(). The exit code is 4 where a limit is not held, or a figure has lost more than
a tenth; 1 where a benchmark failed. Measure on an idle machine. One whose program is absent is
left out by name. Not among them: chaos and mutations, which are right or wrong.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
# Each with the program without which it cannot be.
BENCHES = {
    **dict.fromkeys(("throughput", "peers", "meter", "studies", "truth", "claims", "why"), ""),
    "rehearsal": "slurmctld",
}
LESS, MORE, NEITHER = "at most", "at least", ""  # what is better of a figure
Figures = dict[str, tuple[float, str]]  # value, and what is better


def report(figures: Figures, limits: dict[str, float] | None = None) -> int:
    """Print figures, beside what they are to hold, and all as JSON in the last line.

    Returns the exit code: 4 where a limit is not held.
    """
    code = 0
    for name, (value, better) in figures.items():
        said = ""
        if name in (limits or {}):
            limit = (limits or {})[name]
            held = value <= limit if better == LESS else value >= limit
            said, code = (
                f"  {better} {limit:g}: {'held' if held else 'MISSED'}",
                code if held else 4,
            )
        print(f"{name:44} {value:10.4g}{said}")
    print(json.dumps(figures), flush=True)
    return code


def machine() -> dict[str, Any]:
    """Where and when figures were taken."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "torch": version("torch"),
        "load": round(os.getloadavg()[0], 1),
    }


def run(bench: str, words: list[str]) -> tuple[Figures, int]:
    """Run a benchmark, whose output is shown as it comes; its figures and its exit code."""
    command = [sys.executable, "-u", f"tests/bench/{bench}.py", *words]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    figures = json.loads(last) if last.startswith("{") else {}
    return {f"{bench}: {name}": figure for name, figure in figures.items()}, process.returncode


def losses(now: Figures, before: Figures) -> list[str]:
    """The figures that have become worse by more than a tenth."""
    lost = []
    for name, (value, better) in now.items():
        last = before[name][0] if name in before else value
        worse = {LESS: value > last * 1.1, MORE: value < last * 0.9}
        print(f"{name:56} {value:10.4g} {last:10.4g}{'  LOST' if worse.get(better) else ''}")
        lost += [name] if worse.get(better) else []
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and run none")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--against", type=Path, metavar="FILE", help="figures of --save")
    args, words = parser.parse_known_args()
    if args.list:
        print(*(f"python tests/bench/{bench}.py" for bench in args.only), sep="\n")
        return 0
    here, now, failed, code = machine(), Figures(), list[str](), 0
    print(", ".join(f"{name} {value}" for name, value in here.items()))
    for bench in args.only:
        if (needed := BENCHES[bench]) and not shutil.which(
            needed, path=f"{os.environ['PATH']}:/usr/sbin"
        ):
            print(f"\n== {bench}: left out, as {needed} is not installed")
            continue
        print(f"\n== {bench}", flush=True)
        found, ended = run(bench, words)
        now |= found
        code = max(code, ended if ended == 4 else 0)
        failed += [bench] if not found or ended not in (0, 4) else []
    if args.against:
        before = json.loads(args.against.read_text())
        print(f"\nbeside {before['machine']}:")
        code = 4 if losses(now, before["figures"]) else code
    if args.save:
        args.save.write_text(json.dumps({"machine": here, "figures": now}, indent=1) + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main())
