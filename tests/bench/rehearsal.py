"""The launcher, run.sh, the collector and the report at full size, with simulated ranks.

    python tests/bench/rehearsal.py                                64 nodes of 4 ranks
    python tests/bench/rehearsal.py --nodes 256 --ranks-per-node 4

Four sizes are run on a minicluster, from an eighth of the nodes to all of them; the exponent says
how a quantity grows with the ranks: 0 not at all, 1 as the job. The ranks are small processes
without torch that write records. Calls are those that read or write, without opens and stats.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import ROOT, report

sys.path.insert(0, str(ROOT / "src"))

from jobkit.paths import read_json
from minicluster.cluster import temporary

RANK = """
import os, time
from jobkit.program import meter
meter.start(unit="simulated steps")
for _ in range(20):
    time.sleep(0.01)
    meter.step(work=1)
meter.epoch(0)
meter.end()
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    print(open("/proc/self/io").read())
"""
SITE = 'gpu_request = "none"\ntime = "01:00:00"\n'
FASTER = 1.2  # exponents above it are named; seconds on a busy machine scatter


def calls(text: str) -> int:
    """The read and write calls that the text of a /proc/PID/io counts."""
    return sum(int(number) for number in re.findall(r"^sysc[rw]: (\d+)", text, re.MULTILINE))


def calls_of(*words: str) -> int:
    """Run a command of jobkit; the calls of it and of the processes that it waited for."""
    words = (sys.executable, "-m", "jobkit", *words)
    with subprocess.Popen(words, stdout=sys.stderr, stdin=subprocess.DEVNULL) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its counts are still there
        counted = calls(Path(f"/proc/{process.pid}/io").read_text())
    if process.returncode:
        sys.exit(f"{' '.join(words)}: exit code {process.returncode}")
    return counted


def rehearse(logs: Path, size: str) -> dict[str, float]:
    """Submit, run, collect and plot one study of one run; return its quantities by name."""
    name = f"rehearse-{size}"
    words = ["--name", name, "--gpus", size, "--site", str(logs / "site.toml")]
    words += ["--no-wait", "--no-auto", "--", sys.executable, str(logs / "rank.py")]
    submit = calls_of("run", *words)
    (spec,) = (logs / name).glob("*/spec.json")
    while "elapsed_s" not in (job := read_json(spec.parent / "job.json") or {}):
        time.sleep(1)
    log = (spec.parent / "train.log").read_text(errors="replace")
    sizes = [path.lstat().st_size for path in (logs / name).rglob("*") if path.is_file()]
    return {
        "submit, calls": submit,
        "job, s": float(job["elapsed_s"]),
        "job, files": len(sizes),
        "job, MiB": sum(sizes) / 2**20,
        "one rank, calls": calls(log),
        "collect, calls": calls_of("collect", name),
        "report, calls": calls_of("plot", name),
    }


def table(ranks: dict[str, int], found: list[dict[str, float]]) -> str:
    """A Markdown table: a row for each quantity, a column for each size, and the exponent."""
    head = ["", *(f"{r:,} ({size})" for size, r in ranks.items()), "exponent"]
    lines, first, last = [head, ["---", *["---:"] * (len(head) - 1)]], *list(ranks.values())[::3]
    faster = []
    for name in found[0]:
        values = [one[name] for one in found]
        power = math.log(max(values[-1], 1e-9) / max(values[0], 1e-9)) / math.log(last / first)
        shown = [f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in values]
        lines.append([name, *shown, f"{power:.2f}"])
        if power > FASTER and not (name.endswith(" s") and min(values) < 1):
            faster.append(name)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\ngrows faster than the job: {'; '.join(faster) or 'nothing'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=64, help="of the largest size, 16 or more")
    parser.add_argument("--ranks-per-node", type=int, default=4)
    args = parser.parse_args()
    nodes = [args.nodes // part for part in (8, 4, 2, 1)]
    ranks = {f"{n}x{args.ranks_per_node}": n * args.ranks_per_node for n in nodes}
    size = {"nodes": args.nodes, "cores": args.ranks_per_node, "gpus": 0}
    with (
        temporary("rehearsal", **size),
        tempfile.TemporaryDirectory(prefix="rehearsal-") as name,
    ):
        logs = Path(name)
        (logs / "site.toml").write_text(SITE)
        (logs / "rank.py").write_text(RANK)
        os.environ |= {"JOBKIT_LOGS": name, "PYTHONPATH": str(ROOT / "src")}
        found = [rehearse(logs, one) for one in ranks]
    print(table(ranks, found))
    counted = ("job, files", "one rank, calls", "collect, calls", "report, calls")
    return report({name: found[-1][name] for name in counted})


if __name__ == "__main__":
    sys.exit(main())
