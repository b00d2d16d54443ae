"""`make bench`: the start-up hook on a plain loop: its cost per step, and its figures.

The same script runs in turns without anything, under the hook, and under TraceML where the command
traceml is installed. It prints its own clocks: per step, after ten of them, time, wait for data,
and CPU time, in which the overhead is seen on a busy machine too. Figures are medians over rounds;
the overhead is the median of the ratios within a round.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
AUTO = ROOT / "src" / "jobkit" / "program" / "auto"
SKIP, STEPS = 10, 400

SCRIPT = f"""
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn({64 * STEPS}, 512), torch.randint(10, ({64 * STEPS},)))
waited, steps, batches = 0.0, 0, iter(DataLoader(data, 64))
while True:
    asked = time.perf_counter()
    batch = next(batches, None)
    if batch is None: break
    waited += time.perf_counter() - asked
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    steps += 1
    if steps == {SKIP}: begin, cpu, waited = time.perf_counter(), time.process_time(), 0.0
    end = time.perf_counter()
print("OWN", *(x / (steps - {SKIP}) for x in (end - begin, waited, time.process_time() - cpu)))
"""


def run(command: list[str], **env: str) -> list[float]:
    """Seconds of a step, of its wait for data, and of CPU, by the program's own clocks."""
    done = subprocess.run(
        command, env={**os.environ, **env}, check=True, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if "OWN" in line)
    return [float(word) for word in line.split("OWN")[1].split()]


def under_hook(script: Path, folder: Path) -> tuple[list[float], tuple[float, float]]:
    """The program's own figures under the hook, and the hook's."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    env = {"JOBKIT_AUTO": "1", "JOBKIT_RUN_DIR": str(folder / "run"), "PYTHONPATH": str(AUTO)}
    own = run([sys.executable, str(script)], JOBKIT_WARMUP_STEPS=str(SKIP), **env)
    lines = (folder / "run" / "metrics" / "0.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["kind"] == "window" and not r["warmup"]]
    steps = sum(r["steps"] for r in found)
    assert steps == STEPS - SKIP
    assert sum(r["work"] for r in found) == 64 * steps
    return own, (
        sum(r["wall_s"] for r in found) / steps,
        sum(r["data_wait_s"] for r in found) / steps,
    )


def main() -> int:
    """Measure and print; 4 where the hook's figures differ by more than 2 % from the program's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    traceml = shutil.which("traceml")
    plain, hooked, difference, waits, peer = [], [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        os.chdir(folder)  # where TraceML leaves its files
        for _ in range(rounds):
            plain.append(run([sys.executable, str(script)])[2])
            own, ours = under_hook(script, folder)
            hooked.append(own[2])
            difference.append(ours[0] / own[0] - 1)
            waits.append(ours[1] / own[1] - 1)
            if traceml:
                peer.append(run([traceml, "run", str(script)])[2])
    print(f"plain loop: {1e3 * median(plain):.2f} ms of CPU per step")
    for who, times in (("hook", hooked), ("traceml", peer)):
        if times:
            over = median(b / a - 1 for a, b in zip(plain, times, strict=True))
            print(f"{who}: {1e3 * median(times):.2f} ms of CPU per step, {over:+.1%}")
    print(f"the hook's time per step, less the program's own: {median(difference):+.2%}")
    print(f"the hook's wait for data, less the program's own: {median(waits):+.2%}")
    return 4 if abs(median(difference)) > 0.02 else 0


if __name__ == "__main__":
    sys.exit(main())
