"""`make bench`: every benchmark, and its figures beside the last ones kept in the repository.

    python tests/bench/bench.py --list                        their names, and how long they took
    python tests/bench/bench.py --only throughput peers       some of them
    python tests/bench/bench.py --keep                        keep the figures as the last ones

The kept figures are in tests/bench/kept.json, for each processor and number of cores, with their
date and versions, those of the last --keep, and the seconds of each benchmark. The exit code is 4
where a figure has lost more than --tolerance, and 1 where a benchmark failed. Measure on an idle
machine: the load at the start is kept too. A benchmark whose program is absent is left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from figures import BENCHES, changes, found_in, key_of
from throughput import ENV, ROOT, machine

KEPT = ROOT / "tests/bench/kept.json"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
WORDS = {  # after python; of the others tests/bench/NAME.py
    "check_ranks": (*TORCHRUN, "tests/bench/check_ranks.py", "--device=cpu"),
    "rehearse": ("-m", "jobkit", "rehearse", "--nodes=64", "--ranks-per-node=4"),
}
# Programs without which a benchmark cannot be.
NEEDS = {"inference": "cmake", **dict.fromkeys(("rehearse", "step_model", "wide"), "slurmctld")}


def words_of(bench: str) -> tuple[str, ...]:
    """The command of a benchmark, after python."""
    return WORDS.get(bench, (f"tests/bench/{bench}.py",))


def absent(bench: str) -> str | None:
    """The program that the benchmark needs and that is not there."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    needed = NEEDS.get(bench)
    return needed if needed and not shutil.which(needed, path=path) else None


def show(benches: Iterable[str], seconds: dict[str, float]) -> None:
    """Print each benchmark's command, and how long it took when its figures were kept."""
    for bench in benches:
        took = f"{seconds[bench]:6.0f} s" if bench in seconds else "       -"
        print(f"{bench:12} {took}  python {' '.join(words_of(bench))}")


def printed(bench: str) -> tuple[str, int]:
    """Run a benchmark; what it printed, shown as it comes, and its exit code."""
    words = [sys.executable, "-u", *words_of(bench)]
    lines = []
    with subprocess.Popen(words, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return "".join(lines), process.returncode


def compare(now: dict[str, float], last: dict, where: str, tolerance: float) -> bool:
    """Print each figure beside the kept one; whether none has lost too much."""
    said = f"kept on {last['date']}, torch {last['torch']}" if last else "none kept yet"
    print(f"\n{where}: {said}\n{'figure':42} {'now':>9} {'kept':>9}")
    good = True
    for name, value, before, lost in changes(now, last.get("figures", {}), tolerance):
        kept = "" if before is None else f"{before:9.4g}"
        print(f"{name:42} {value:9.4g} {kept}{'  lost' if lost else ''}")
        good = good and not lost
    return good


def main() -> int:
    """Run, compare, keep where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES)
    parser.add_argument("--tolerance", type=float, default=0.1, help="share (default 0.1)")
    parser.add_argument("--keep", action="store_true", help="keep these figures as the last ones")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and run none")
    args = parser.parse_args()
    here = {**machine(), "load": round(os.getloadavg()[0], 1)}
    everything = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    where = key_of(here)
    last = everything.get(where, {})
    seconds = last.get("seconds", {})
    if args.list:
        show(args.only, seconds)
        return 0
    if here["load"] > 0.5:
        print(f"the machine is not idle (load {here['load']}): figures will be off")
    now, failed, took = dict[str, float](), list[str](), dict[str, float]()
    for bench in args.only:
        if program := absent(bench):
            print(f"\n== {bench}: left out, as {program} is not installed")
            continue
        before = f" (took {seconds[bench]:.0f} s when kept)" if bench in seconds else ""
        print(f"\n== {bench}{before}", flush=True)
        begin = time.monotonic()
        text, code = printed(bench)
        took[bench] = round(time.monotonic() - begin)
        print(f"== {bench} took {took[bench]:.0f} s", flush=True)
        found = found_in(bench, text)
        now |= found
        if not found or code not in (0, 4):  # 4: a limit is not held, which it has printed
            failed.append(bench)
    good = compare(now, last, where, args.tolerance)
    if args.keep:
        figures = last.get("figures", {}) | now
        kept = {name: here[name] for name in ("date", "torch", "python", "load")}
        sound = {bench: s for bench, s in took.items() if bench not in failed}
        everything[where] = {**kept, "figures": figures, "seconds": seconds | sound}
        KEPT.write_text(json.dumps(everything, indent=1) + "\n")
        print(f"kept in {Path(KEPT).relative_to(ROOT)}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0 if good else 4


if __name__ == "__main__":
    sys.exit(main())
