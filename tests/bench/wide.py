"""Real ranks on many nodes: the MLP under DDP, a few steps on a minicluster.

    python tests/bench/wide.py                       8 nodes of 4 ranks, and a half and a quarter
    python tests/bench/wide.py --nodes 16

For each size: the largest peak memory of a rank, the seconds from the start of rank 0's process to
the first step, of them those of the imports and of the process group, and whether the parameters
were the same on all ranks after every step (--check-ranks 1). As root each node has an address of
its own. The ranks of a node share the pages of torch's libraries.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from jobkit.launch.slurm.minicluster import Minicluster  # noqa: E402

RANKS_PER_NODE = 4
STEPS, IMAGES_PER_RANK = 5, 16
COLUMNS = ("resident_memory_mib", "startup_s", "startup_import_s", "startup_group_s")


def train(folder: Path, nodes: list[int]) -> dict[int, dict[str, str]]:
    """Train once on each number of nodes; return the rows of results.csv by ranks."""
    sizes = [f"{n}x{RANKS_PER_NODE}" for n in nodes]
    images = IMAGES_PER_RANK * RANKS_PER_NODE * max(nodes) * STEPS
    words = [sys.executable, "run_benchmarks.py", "--study", "weak", "--name", "wide"]
    words += ["--strategies", "ddp", "--gpus", *sizes, "--repeats", "1", "--within-allocation"]
    words += ["--model", "mlp", "--dataset", "synthetic", "--train-samples", str(images)]
    words += ["--test-samples", "64", "--batch-size-per-rank", str(IMAGES_PER_RANK)]
    words += ["--epochs", "1", "--max-steps", str(STEPS), "--check-ranks", "1", "--threads", "1"]
    words += ["--device", "cpu", "--breakdown-iterations", "0", "--time", "00:30:00"]
    words += ["--no-collect"]
    env = {**os.environ, "JOBKIT_LOGS": str(folder / "logs")}
    env |= {"JOBKIT_DATA_DIR": str(folder / "data")}
    for command in (words, [sys.executable, "collect_results.py", "wide"]):
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=sys.stderr)
    with (folder / "logs" / "wide" / "results.csv").open() as file:
        return {int(row["world_size"]): row for row in csv.DictReader(file)}


def table(rows: dict[int, dict[str, str]]) -> str:
    """A Markdown table with a row for each number of ranks."""
    lines = ["| ranks | " + " | ".join((*COLUMNS, "parameters")) + " |"]
    lines.append("|--:" * (1 + len(COLUMNS)) + "|--|")
    for ranks, row in sorted(rows.items()):
        same = "the same" if row["status"] == "ok" else row["status"]
        values = [f"{float(row[c]):.1f}" if row[c] else "" for c in COLUMNS]
        lines.append(f"| {ranks} | {' | '.join(values)} | {same} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=8, help="of the largest size")
    args = parser.parse_args()
    sizes = sorted({max(1, args.nodes // part) for part in (4, 2, 1)})
    words = (f"--nodes={args.nodes}", f"--cores={RANKS_PER_NODE}")
    cluster = Minicluster.up("wide", *words, links=True)
    try:
        with tempfile.TemporaryDirectory(prefix="wide-") as name:
            print(table(train(Path(name), sizes)))
    finally:
        cluster.down()


if __name__ == "__main__":
    main()
