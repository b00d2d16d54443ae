"""How well does the step model predict? Real ranks and network, and computation that only waits.

Nodes of a minicluster, one rank on each, with links of a known rate between them. The layers of the
model sleep as long as a device would compute, so that many ranks fit on few cores; the gradients
travel through Gloo over the links. `jobkit comm` measures the links, run_benchmarks.py the study,
and `jobkit step-model` predicts the sizes to which it was not fitted.

    python tests/bench/step_model.py                    as root: the nodes have links of their own
    python tests/bench/step_model.py --rate 50mbit --nodes 4
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import LESS, ROOT, report

DOOR = [sys.executable, str(ROOT / "hpc" / "minicluster")]
WAITING = '''
import time
import torch
from torch import nn

SAMPLE_S = 0.004  # forward and backward

class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.samples = len(x)
        time.sleep(SAMPLE_S / 3 * ctx.samples)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SAMPLE_S * 2 / 3 * ctx.samples)
        return gradient

class Waiting(nn.Module):
    """400,000 parameters, and next to no computation."""
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU())
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        hidden = self.layers(x)
        return self.head(Wait.apply(hidden) if self.training else hidden)
'''


def run(words: list[str], env: dict[str, str]) -> str:
    """Run a command, and show what it says where it fails."""
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def bring_up(folder: Path, nodes: int, rate: str) -> dict[str, str]:
    """A minicluster with slow links; returns the environment that leads to it."""
    at = ["--dir", str(folder / "slurm")]
    run([*DOOR, "up", "--netns", f"--nodes={nodes}", *at], dict(os.environ))
    for number in range(1, nodes + 1):
        run([*DOOR, "link", "slow", f"n{number}", rate, *at], dict(os.environ))
    said = run([*DOOR, "env", *at], dict(os.environ)).splitlines()
    pairs = dict(shlex.split(line)[1].split("=", 1) for line in said)
    (folder / "waiting.py").write_text(WAITING)
    own = {"PYTHONPATH": str(folder), "JOBKIT_LOGS": str(folder / "logs")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "JOBKIT_DATA_DIR": str(folder / "data"), **pairs, **own}


def measure(folder: Path, nodes: int, repeats: int, env: dict[str, str]) -> str:
    """Measure the links at each size, then the study.

    Returns what the step model says with the links of the largest size, and of all.
    """
    counts = [n for n in (1, 2, 4, 8, 16) if n <= nodes]
    links = [comm(folder / "logs" / "comm" / f"links-{n}", n, env) for n in counts[1:]]
    sizes = [f"{n}x1" for n in counts]
    words = [sys.executable, "run_benchmarks.py", "--study", "strong", "--name", "steps"]
    words += ["--strategies", "ddp", "fsdp", "--repeats", str(repeats), "--within-allocation"]
    words += ["--gpus", *sizes, "--epochs", "3", "--model", "waiting:Waiting", "--device", "cpu"]
    words += ["--dataset", "synthetic", "--train-samples", "768", "--test-samples", "64"]
    words += ["--global-batch-size", "64", "--threads", "1", "--why", "0"]
    print(run(words, env))
    words = [sys.executable, "-m", "jobkit", "step-model", "steps", "--comm"]
    env = {**env, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}"}
    largest, every = run([*words, links[-1]], env), run([*words, *links], env)
    return f"links measured on {nodes} nodes:\n{largest}\nlinks measured at each size:\n{every}"


def comm(folder: Path, nodes: int, env: dict[str, str]) -> str:
    """Measure the links between so many nodes; return the comm.json."""
    words = ["sbatch", "--wait", f"--nodes={nodes}", "--ntasks-per-node=1", "--output=/dev/null"]
    words += ["hpc/comm.sh", "--ops", "all_reduce", "all_gather", "reduce_scatter"]
    words += ["--min-bytes", "64K", "--max-bytes", "16M"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    run([*words, "--run-dir", str(folder)], env)
    print((folder / "comm.json").read_text())
    return str(folder / "comm.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rate", default="200mbit", help="of each node's link")
    parser.add_argument("--repeats", type=int, default=3, help="of each size (default 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jb-", dir="/tmp") as name:
        folder = Path(name)
        try:
            cluster = bring_up(folder, args.nodes, args.rate)
            said = measure(folder, args.nodes, args.repeats, cluster)
        finally:
            subprocess.run([*DOOR, "down", "--dir", str(folder / "slurm")], stdout=-3)
    print(said)
    off = re.findall(r"(ddp|fsdp): fitted to 1, 2, 4 ranks, 8 .*: [+-]?([\d.]+)%", said)
    return report({f"{way}: 8 ranks off by, %": (float(x), LESS) for way, x in reversed(off)})


if __name__ == "__main__":
    sys.exit(main())
