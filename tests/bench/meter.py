"""What the meter and the start-up hook cost a step, and whether they agree with a program's clock.

Cost: 2,500 steps that do nothing, with loader and values, in a run's folder (so with all its
windows), less the same loop without the meter; CPU time per step, median of rounds, each a process
of its own. Sampler: CPU time of a process that does nothing but sample its node, 200 times, 50 ms
apart, so that each sample starts with cold caches. Hook: a plain loop of 400 steps with and without
it, in turns; the loop prints its own clocks of the steps after the first ten.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench import LESS, NEITHER, ROOT, Figures, report

AUTO = ROOT / "src" / "jobkit" / "program" / "auto"
SKIP, STEPS = 10, 400
LIMITS = {
    "meter, us per step": 50,
    "sampler, us per sample": 2000,
    "hook less the program's clock, %": 2,
}

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
    if steps == {SKIP}:
        begin, cpu = time.perf_counter(), time.process_time()
        waited = 0.0
    end = time.perf_counter()
found = [x / (steps - {SKIP}) for x in (end - begin, waited, time.process_time() - cpu)]
print(*found, file=sys.stderr)
"""
COST = """
import sys, time
from jobkit import meter
def loop(batches, step):
    begin = time.process_time()
    for i in batches: step(32, i)
    return time.process_time() - begin
plain = loop(range(2500), lambda work, i: None)
meter.start(unit="samples")
ours = loop(meter.batches(range(2500)), lambda work, i: meter.step(work=work))
meter.end()
print((ours - plain) / 2500, file=sys.stderr)
"""

SAMPLER_COST = """
import os, sys, time
from pathlib import Path
from jobkit.program import machine as sampling
from jobkit.program.lines import Writer
sampling.interval_s = lambda age_s: 0.05
path = Path(os.environ["JOBKIT_RUN_DIR"], "samples.jsonl")
writer = Writer(study="s", run_id="r", attempt=0, rank=0, path=path, log=None)
sampler = sampling.Sampler(writer, [], True, {"JOBKIT_NODE_ALONE": "1"})
begin = time.process_time()
sampler.start()
while path.read_bytes().count(b"\\n") < 200: time.sleep(1)
cost = time.process_time() - begin
print(cost / path.read_bytes().count(b"\\n"), file=sys.stderr)
sampler.stop()
"""


def python(program: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program run to its end, with its output."""
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **env},
        check=True,
        capture_output=True,
        text=True,
    )


def cost_s(program: str) -> float:
    """Seconds of CPU time that the measurement adds to one step."""
    with tempfile.TemporaryDirectory() as folder:
        return float(python(program, JOBKIT_RUN_DIR=folder).stderr.splitlines()[-1])


def hooked(on: bool) -> tuple[list[float], list[float]]:
    """Seconds of a step, of its wait for data and of CPU by the program; the first two by the hook.

    The hook's are empty where it is off.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {"JOBKIT_AUTO": "1", "JOBKIT_RUN_DIR": f"{folder}/run", "PYTHONPATH": str(AUTO)}
        env |= {"JOBKIT_WARMUP_STEPS": str(SKIP), "JOBKIT_WHY": "0"}  # profiled ones are no steps
        own = [float(x) for x in python(SCRIPT, **(env if on else {})).stderr.split()[-3:]]
        if not on:
            return own, []
        lines = Path(folder, "run/metrics/0.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["kind"] == "window" and not r["warmup"]]
    steps = sum(r["steps"] for r in found)
    assert steps == STEPS - SKIP and sum(r["work"] for r in found) == 64 * steps
    return own, [sum(r[name] for r in found) / steps for name in ("wall_s", "data_wait_s")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    figures = Figures()
    cost = median(cost_s(COST) for _ in range(rounds))
    figures["meter, us per step"] = 1e6 * cost, LESS
    sample_s = median(cost_s(SAMPLER_COST) for _ in range(rounds))
    figures["sampler, us per sample"] = 1e6 * sample_s, LESS
    pairs = [(hooked(False)[0], *hooked(True)) for _ in range(rounds)]
    off = median(ours[0] / own[0] - 1 for _, own, ours in pairs)
    figures["hook less the program's clock, %"] = 100 * abs(off), LESS
    waits = median(ours[1] / own[1] - 1 for _, own, ours in pairs)
    figures["hook's wait for data less the program's, %"] = 100 * waits, NEITHER
    over = median(own[2] / plain[2] - 1 for plain, own, _ in pairs)
    figures["hook, CPU time of a step of the plain loop, %"] = 100 * over, NEITHER
    return report(figures, LIMITS)


if __name__ == "__main__":
    sys.exit(main())
