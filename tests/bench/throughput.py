"""`make bench`: ours against the plain recipe and against no data work; ranks against ranks.

Everything is measured in one run and alternating, so that a drift of the machine meets all alike;
figures are medians, and ratios are medians of the ratios within a round. Writes bench.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
WAYS = {"plain-0": "plain-0", "plain-2": "plain-2", "ours": "payload", "nodata": "payload"}
TARGETS = {
    "fp32 ours / plain, best": 1.4,
    "bf16 ours / plain, best": 2.0,
    "fp32 ours / no data work": 0.97,
    "bf16 ours / no data work": 0.97,
    "ddp 2 ranks / 1 rank": 1.85,
    "fsdp 2 ranks / 1 rank": 1.6,
}
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}


def has_bf16() -> bool:
    """Whether the processor computes in bf16: elsewhere it is slow, and says nothing."""
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def machine() -> dict[str, str | int]:
    """Where and when figures were taken."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


class Worker:
    """A process that stands ready to train; it takes no time while others run."""

    def __init__(self, loop: str, precision: str, threads: int) -> None:
        words = [str(ROOT / "tests/bench/worker.py"), loop, precision, str(threads)]
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=-1, stdout=-1, text=True, env=ENV
        )
        assert self.process.stdout.readline() == "ready\n", loop

    def measure(self, how: str) -> tuple[float, float]:
        """Images a second, and the share of the time spent waiting for data."""
        self.process.stdin.write(f"{how}\n")
        self.process.stdin.flush()
        rate, waited = self.process.stdout.readline().split()
        return float(rate), float(waited)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def ways(precision: str, threads: int, rounds: int) -> dict[str, list[float]]:
    """Images a second of each way, round by round, and our share of waiting for data."""
    workers = {loop: Worker(loop, precision, threads) for loop in dict.fromkeys(WAYS.values())}
    found: dict[str, list[float]] = {way: [] for way in (*WAYS, "data_wait_share")}
    for _ in range(rounds):
        for way, loop in WAYS.items():
            rate, waited = workers[loop].measure("nodata" if way == "nodata" else "")
            found[way].append(rate)
            if way == "ours":
                found["data_wait_share"].append(waited)
    for worker in workers.values():
        worker.end()
    return found


def run_rate(strategy: str, ranks: int, data: str, *more: str) -> float:
    """Images a second of a run of run.sh with one thread a rank: the median of its epochs."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--nproc-per-node", str(ranks), "--run-dir", f"{folder}/bench/run"]
        words += ["--strategy", strategy, "--dataset", "synthetic", "--train-samples", "4096"]
        words += ["--test-samples", "100", "--epochs", "4", "--global-batch-size", "256"]
        words += ["--threads", "1", "--lr", "0.01", "--data-dir", data, *more]
        words += ["--breakdown-iterations", "0"]
        subprocess.run(["bash", "run.sh", *words], cwd=ROOT, check=True, env=ENV, stdout=-3)
        lines = Path(folder, "bench/run/metrics/0.jsonl").read_text().splitlines()
    epochs = [r for r in map(json.loads, lines) if r["kind"] == "epoch"]
    return median(r["images_per_s"] for r in epochs[1:])


def plain_ddp_rate(workers: int) -> float:
    """Images a second of the plain recipe under DDP, two ranks of one thread."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(ROOT / "tests/bench/worker.py"), f"plain-{workers}", "fp32", "1"]
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *words], check=True, capture_output=True, text=True, env=env)
    return float(done.stdout)


def scaling(rounds: int) -> dict[str, list[float]]:
    """Images a second at one and at two ranks, round by round."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as data:
        for _ in range(rounds):
            for strategy in ("ddp", "fsdp"):
                for ranks in (1, 2):
                    rate = run_rate(strategy, ranks, data)
                    found.setdefault(f"{strategy}-{ranks}", []).append(rate)
            found.setdefault("plain-ddp-2", []).append(plain_ddp_rate(0))
    return found


def help_s(rounds: int) -> float:
    """Seconds that `python run_benchmarks.py --help` takes."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "run_benchmarks.py", "--help"], cwd=ROOT, stdout=-3)
        times.append(time.perf_counter() - start)
    return median(times)


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios within each round."""
    return median(a / b for a, b in zip(above, below, strict=True))


def ratios_of(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """What is compared with the targets."""
    made = {}
    for precision in ("fp32", "bf16"):
        if (rates := found.get(precision)) is None:
            continue
        best = max(("plain-0", "plain-2"), key=lambda way: median(rates[way]))
        for way in ("plain-0", "plain-2"):
            made[f"{precision} ours / {way}"] = ratio(rates["ours"], rates[way])
        made[f"{precision} ours / plain, best"] = ratio(rates["ours"], rates[best])
        made[f"{precision} ours / no data work"] = ratio(rates["ours"], rates["nodata"])
    ranks = found["ranks"]
    for strategy in ("ddp", "fsdp"):
        name = f"{strategy} 2 ranks / 1 rank"
        made[name] = ratio(ranks[f"{strategy}-2"], ranks[f"{strategy}-1"])
    made["ddp 2 ranks ours / plain"] = ratio(ranks["ddp-2"], ranks["plain-ddp-2"])
    return made


def show(result: dict) -> None:
    """Print images a second, then the ratios beside what they are to reach."""
    for group, rates in result["images_per_s"].items():
        for name, values in rates.items():
            unit = "" if name == "data_wait_share" else " images/s"
            low, mid, high = min(values), median(values), max(values)
            print(f"{group:6} {name:18} {mid:10.4g}{unit}  ({low:.4g} to {high:.4g})")
    for name, value in result["ratios"].items():
        target = TARGETS.get(name)
        verdict = (
            ""
            if target is None
            else f"  to reach {target:g}: " + ["missed", "reached"][value >= target]
        )
        print(f"{name:28} {value:6.3f}{verdict}")
    print(f"{'run_benchmarks.py --help':28} {result['help_s']:6.3f} s  to reach 0.3")


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--output", type=Path, default=ROOT / "bench.json")
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    found = {}
    for precision in ("fp32", "bf16") if has_bf16() else ("fp32",):
        print(f"measuring {precision}, {threads} threads ...", file=sys.stderr)
        found[precision] = ways(precision, threads, args.rounds)
    print("measuring ranks of one thread ...", file=sys.stderr)
    found["ranks"] = scaling(args.rounds)
    result = {
        **machine(),
        "rounds": args.rounds,
        "images_per_s": found,
        "ratios": ratios_of(found),
        "help_s": help_s(args.rounds),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
