"""`make bench`: benchmarks of this folder, one after the other.

    python tests/bench/bench.py --only throughput peers

Each benchmark is a program of its own, which prints its tables and its figures; see report(). The
exit code is 4 where a limit is not held; 1 where a benchmark failed. Measure on an idle machine.
Not among them: chaos and mutations, which are right or wrong.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
BENCHES = ("throughput", "peers", "studies", "truth", "claims", "why")
TWO_RANKS = [
    *("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
    "--nproc-per-node=2",
]
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
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=BENCHES)
    args, words = parser.parse_known_args()
    codes = {}
    for bench in args.only:
        print(f"\n== {bench}", flush=True)
        command = [sys.executable, f"tests/bench/{bench}.py", *words]
        codes[bench] = subprocess.run(command, cwd=ROOT, env=ENV).returncode
    if failed := [bench for bench, code in codes.items() if code not in (0, 4)]:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
