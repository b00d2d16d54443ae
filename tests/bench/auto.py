"""`make bench`: the start-up hook on a plain loop: its cost per step, and its figures.

The same script runs in turns without anything and under the hook, and then, where the command
traceml is installed, under TraceML: as it is, and with the calls that TraceML wants in a loop. It
prints its own clocks: per step, after ten of them, time, wait for data, and CPU time, in which the
overhead is seen on a busy machine too. Figures are medians over rounds; the overhead of the hook is
the median of the ratios within a round.
"""

import argparse
import json
import os
import shutil
import socket
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
waited, all_waited, steps, batches = 0.0, 0.0, 0, iter(DataLoader(data, 64))
first = time.perf_counter()
while True:
    asked = time.perf_counter()
    batch = next(batches, None)
    if batch is None: break
    waited += time.perf_counter() - asked
    with traced(model):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    steps += 1
    if steps == {SKIP}:
        begin, cpu = time.perf_counter(), time.process_time()
        all_waited, waited = waited, 0.0
    end = time.perf_counter()
found = [x / (steps - {SKIP}) for x in (end - begin, waited, time.process_time() - cpu)]
print("OWN", *found, (end - first) / steps, (all_waited + waited) / steps)
"""
PLAIN = "from contextlib import nullcontext as traced\n"
SDK = "import traceml_ai\ntraceml_ai.init()\nfrom traceml_ai import trace_step as traced\n"


def run(command: list[str], **env: str) -> list[float]:
    """Seconds of a step, of its wait for data, and of CPU, by the program's own clocks; then step
    and wait with the first steps.
    """
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


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def under_traceml(command: str, script: Path, folder: Path) -> tuple[list[float], dict[str, float]]:
    """The program's own figures under TraceML, and TraceML's, of all steps."""
    shutil.rmtree(folder / "logs", ignore_errors=True)
    ports = [f"--{name}-port={free_port()}" for name in ("master", "aggregator")]
    own = run([command, "run", *ports, str(script)])
    (summary,) = folder.glob("logs/*/final_summary.json")
    found = json.loads(summary.read_text())["step_time"]["global"]
    means = {k: v for k, v in found["average"].items() if v is not None}
    return own, {**means, "steps": found["window"]["steps_analyzed"] or 0}


def traceml_figures(command: str, plain: list[float], rounds: int, folder: Path) -> None:
    """Measure and print TraceML, on the script as it is and with its calls in it."""
    for name, head in (("unchanged", PLAIN), ("with init and trace_step", SDK)):
        script = folder / "peer.py"
        script.write_text(head + SCRIPT)
        pairs = [under_traceml(command, script, folder) for _ in range(rounds)]
        cpu = median(own[2] for own, _ in pairs)
        steps = median(said["steps"] for _, said in pairs)
        print(f"traceml, script {name}: {1e3 * cpu:.2f} ms of CPU per step", end="")
        print(f", {cpu / median(plain) - 1:+.1%}; {steps:.0f} of {STEPS} steps found")
        for at, key, what in ((3, "step_time_ms", "time per step"), (4, "input_wait_ms", "wait")):
            off = [said[key] / 1e3 / own[at] - 1 for own, said in pairs if key in said]
            if off:
                print(f"  its {what}, less the program's own: {median(off):+.2%}")


def main() -> int:
    """Measure and print; 4 where the hook's figures differ by more than 2 % from the program's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    traceml = shutil.which("traceml")
    plain, hooked, difference, waits = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(PLAIN + SCRIPT)
        for _ in range(rounds):
            plain.append(run([sys.executable, str(script)])[2])
            own, ours = under_hook(script, folder)
            hooked.append(own[2])
            difference.append(ours[0] / own[0] - 1)
            waits.append(ours[1] / own[1] - 1)
    print(f"plain loop: {1e3 * median(plain):.2f} ms of CPU per step")
    over = median(b / a - 1 for a, b in zip(plain, hooked, strict=True))
    print(f"hook: {1e3 * median(hooked):.2f} ms of CPU per step, {over:+.1%}")
    print(f"the hook's time per step, less the program's own: {median(difference):+.2%}")
    print(f"the hook's wait for data, less the program's own: {median(waits):+.2%}")
    if traceml:
        with tempfile.TemporaryDirectory() as name:
            os.chdir(name)  # where TraceML leaves its files
            traceml_figures(traceml, plain, rounds, Path(name))
            os.chdir(ROOT)
    return 4 if abs(median(difference)) > 0.02 else 0


if __name__ == "__main__":
    sys.exit(main())
