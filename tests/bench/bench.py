"""`make bench`: benchmarks of this folder, one after the other.

    python tests/bench/bench.py --only throughput peers

Each benchmark is a program of its own, which prints its tables and its figures; see report(). The
exit code is 4 where a limit is not held; 1 where a benchmark failed. Measure on an idle machine.
One whose program is absent is left out by name. Not among them: chaos and mutations, which are
right or wrong.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
# Each with the program without which it cannot be.
BENCHES = {
    **dict.fromkeys(("throughput", "peers", "studies", "truth", "claims", "why"), ""),
    "rehearsal": "slurmctld",
}
Figures = dict[str, float]


def report(
    figures: Figures, at_least: Figures | None = None, at_most: Figures | None = None
) -> int:
    """Print figures, beside the limits that they are to hold.

    Returns the exit code: 4 where a limit is not held.
    """
    code = 0
    for name, value in figures.items():
        line = f"{name:44} {value:10.4g}"
        for words, limits in (("at least", at_least or {}), ("at most", at_most or {})):
            if name in limits:
                held = value >= limits[name] if words == "at least" else value <= limits[name]
                line += f"  {words} {limits[name]:g}: {'held' if held else 'MISSED'}"
                code = code if held else 4
        print(line, flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    args, words = parser.parse_known_args()
    failed, code = list[str](), 0
    for bench in args.only:
        if (needed := BENCHES[bench]) and not shutil.which(
            needed, path=f"{os.environ['PATH']}:/usr/sbin"
        ):
            print(f"\n== {bench}: left out, as {needed} is not installed")
            continue
        print(f"\n== {bench}", flush=True)
        command = [sys.executable, f"tests/bench/{bench}.py", *words]
        ended = subprocess.run(command, cwd=ROOT, env=ENV).returncode
        code = max(code, ended if ended == 4 else 0)
        failed += [bench] if ended not in (0, 4) else []
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else code


if __name__ == "__main__":
    sys.exit(main())
