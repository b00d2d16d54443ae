"""`make bench`: what the meter costs a step, also in the payload's windows, and whether it
agrees with the payload's own clock.

Cost: 2,500 steps that do nothing, with loader and values, in a run's folder (so with all its
windows), less the same loop without the meter; CPU time per step, median of rounds, each a process
of its own. Agreement: jobkit's own training, whose epochs the meter measures too, in one process.
Sampler: CPU time of a process that does nothing but sample its node, 200 times, 50 ms apart, so
that each sample starts with cold caches; with GPUs and counters a sample takes longer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
STEP_S, MOST_SHARE, MOST_DIFFERENCE, MOST_SAMPLING = 0.010, 0.005, 0.01, 0.002

COST = """
import sys, time
from jobkit import meter
def loop(batches, step):
    begin = time.process_time()
    for i in batches: step(32, i)
    return time.process_time() - begin
plain = loop(range(2500), lambda work, i: None)
meter.start(unit="samples")
ours = loop(meter.batches(range(2500)), lambda work, i: meter.step(work=work, train_loss=i))
meter.end()
print((ours - plain) / 2500, file=sys.stderr)
"""

PAYLOAD_COST = """
import os, sys, time
from pathlib import Path
from jobkit.paths import RunPaths
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.payload.windows import StepWindows
def loop(step):
    begin = time.process_time()
    for i in range(2500): step(32)
    return time.process_time() - begin
plain = loop(lambda work: None)
report = Reporter(RunPaths(Path(os.environ["JOBKIT_RUN_DIR"])), 0, 0)
windows = StepWindows(report, RankEnv(), 5)
windows.begin_epoch(0)
def step(work):
    windows.waited(0.0)
    windows.step(work, {})
ours = loop(step)
windows.end_epoch()
windows.finish()
print((ours - plain) / 2500, file=sys.stderr)
"""

SAMPLER_COST = """
import os, sys, time
from pathlib import Path
from jobkit.program import sampling
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

AGREEMENT = """
import sys
from torch.optim.optimizer import register_optimizer_step_post_hook as hook
from jobkit import meter
from jobkit.payload import main, train
plain = train.Trainer.train_epoch
def train_epoch(self, epoch, started, position=0):
    if epoch: meter.current().hold(False)
    found = plain(self, epoch, started, position)
    meter.epoch(epoch)
    meter.current().hold(True)
    return found
train.Trainer.train_epoch = train_epoch
meter.start(unit="images")
hook(lambda *_: meter.step(work=int(sys.argv[1])))
sys.exit(main.main(sys.argv[2:]))
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


def rates() -> tuple[float, float]:
    """Images per second of the same epochs, as the payload and as the meter says."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--run-dir", f"{folder}/run", "--data-dir", folder, "--strategy", "single"]
        words += ["--dataset", "synthetic", "--train-samples", "2048", "--test-samples", "64"]
        words += ["--epochs", "3", "--global-batch-size", "128", "--breakdown-iterations", "0"]
        out = python(AGREEMENT, "128", *words).stdout
    lines = [line[9:] for line in out.splitlines() if line.startswith("[METRIC]")]
    records = [r for r in map(json.loads, lines) if r.get("epoch")]  # the first one has a warm-up
    own = [r for r in records if r["kind"] == "epoch" and "timed_images" in r]
    # The payload's own windows carry the run's id, the meter's none.
    windows = [r for r in records if r["kind"] == "window" and not r["run_id"]]
    assert sum(r["timed_images"] for r in own) == sum(r["work"] for r in windows) > 0
    return (
        sum(r["timed_images"] for r in own) / sum(r["epoch_time_s"] for r in own),
        sum(r["work"] for r in windows) / sum(r["wall_s"] for r in windows),
    )


def main() -> int:
    """Measure and print; 4 where a limit is not held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    costs = {}
    for name, program in (("meter", COST), ("payload's windows", PAYLOAD_COST)):
        cost = costs[name] = median(cost_s(program) for _ in range(rounds))
        print(f"{name}: {1e6 * cost:.1f} us per step, {cost / STEP_S:.3%} of a step of 10 ms")
    sample_s = median(cost_s(SAMPLER_COST) for _ in range(rounds))
    # The interval is a second for five minutes, then longer.
    print(f"sampler: {1e6 * sample_s:.0f} us per sample, {sample_s:.3%} of a core, one per second")
    pairs = [rates() for _ in range(rounds)]
    difference = median(meter / own - 1 for own, meter in pairs)
    own, ours = (median(each) for each in zip(*pairs, strict=True))
    print(f"payload {own:,.0f} images/s, meter {ours:,.0f} images/s: {difference:+.2%}")
    missed = max(costs.values()) / STEP_S > MOST_SHARE or abs(difference) > MOST_DIFFERENCE
    return 4 if missed or sample_s > MOST_SAMPLING else 0


if __name__ == "__main__":
    sys.exit(main())
