"""What the profiled steps say, against truths that a program plants and clocks itself.

    python tests/bench/why.py causes                 each planted cause, and an undisturbed run
    python tests/bench/why.py overhead --seconds 60  a program with and without, alternating
    python tests/bench/why.py remedies               what each change gains, on the same programs
    python tests/bench/why.py peers --python PYTHON  what TraceML and HTA find of the same runs

Two ranks with Gloo on this machine. A truth is the seconds of a step that the program itself took
for what it planted, by its own clock; that of large gradients is its step less one under no_sync.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import TWO_RANKS, Figures, report
from jobkit.analysis.collect.why import breakdown
from support.warm_programs import Ran, environment

STEPS = 150

# Nothing in it knows of a measurement. What is planted comes from the environment.
PROGRAM = """
import json, os, random, sys, time, torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
E = lambda name, value=0.0: float(os.environ.get(name, value))
torch.set_num_threads(1); torch.manual_seed(0)
dist.init_process_group("gloo"); rank = dist.get_rank()
if cores := os.environ.get("CORES"): os.sched_setaffinity(0, {int(cores.split(",")[rank])})
truth = dict.fromkeys(("late", "data", "host", "rare", "transfer"), 0.0)
def plant(name, seconds):
    if seconds:
        begin = time.perf_counter(); time.sleep(seconds)
        truth[name] += time.perf_counter() - begin
class Data(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i):
        if E("DATA") and (rank == 1 or not E("DATA_LATE")): time.sleep(E("DATA"))
        return torch.randn(256), 0
H, BATCH = int(E("H", 128)), int(E("BATCH", 16))
net = nn.Sequential(nn.Linear(256, H), nn.ReLU(), nn.Linear(H, H), nn.ReLU(), nn.Linear(H, 10))
SYNC = E("SYNC")  # all-reduce after the backward pass, in place of DDP
model = net if SYNC else nn.parallel.DistributedDataParallel(net, bucket_cap_mb=E("BUCKET", 25))
if E("BF16"):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
chance = random.Random(rank)
def passes(x, y):
    nn.functional.cross_entropy(model(x), y).backward()
    if SYNC:
        t = time.perf_counter()
        for p in net.parameters(): dist.all_reduce(p.grad)
        truth["transfer"] += time.perf_counter() - t
loader = iter(DataLoader(Data(), batch_size=BATCH, num_workers=int(E("WORKERS"))))
steps, begin, half = int(E("STEPS")), time.perf_counter(), None
for step in range(steps):
    if step == steps // 2: half = time.perf_counter()
    t = time.perf_counter(); x, y = next(loader); truth["data"] += time.perf_counter() - t
    if rank == 1: plant("late", E("LATE"))
    plant("host", E("HOST"))
    if chance.random() < E("RARE"): plant("rare", 0.1)
    optimizer.zero_grad(); passes(x, y); optimizer.step()
wall = time.perf_counter() - begin
last = (time.perf_counter() - half) / (steps - steps // 2)
truth = {name: seconds / steps for name, seconds in truth.items()}
def clocked(synced):
    dist.barrier(); t = time.perf_counter()
    if synced: passes(x, y)
    else:
        with model.no_sync(): passes(x, y)
    return time.perf_counter() - t
if not SYNC:
    pairs = [(clocked(True), clocked(False)) for _ in range(20)]
    truth["communication"] = sorted(a - b for a, b in pairs)[10]
out = {"wall_s": wall, "step_s": wall / steps, "last_s": last, "truth": truth}
json.dump(out, open(os.environ["TRUTH"] + f".{rank}", "w"))
dist.barrier()
"""

# Two machines with a slow and a fast network between them: namespaces, and two pairs of interfaces.
TWO_NETWORKS = """
ip link set lo up; unshare -n sleep 900 & other=$!; sleep 1; far="nsenter -t $other -n"
for i in 0 1; do
    ip link add net$i type veth peer name net$i netns $other
    ip addr add 10.0.$i.1/24 dev net$i && ip link set net$i up
    $far ip addr add 10.0.$i.2/24 dev net$i && $far ip link set net$i up
done
slow="root tbf rate 400mbit burst 256k latency 50ms"
for at in "" "$far"; do $at tc qdisc add dev net0 $slow; done
export WORLD_SIZE=2 MASTER_ADDR=10.0.1.1 MASTER_PORT=29500
RANK=1 $far "$@" & RANK=0 "$@"; wait $!; kill $other
"""

# Name: what is planted; the column that must say it, and the truth; who is late, and by what.
CASES: dict[str, tuple[dict[str, str], str, str, tuple[int, str] | None]] = {
    "nothing": ({}, "", "", None),
    "rank 1 sleeps": ({"LATE": "0.04"}, "late_s", "late", (1, "host")),
    "slow loader": ({"DATA": "0.002"}, "data_wait_s", "data", None),
    "slow loader on rank 1": (
        {"DATA": "0.002", "DATA_LATE": "1"}, "late_s", "data", (1, "data wait")
    ),
    "slow host": ({"HOST": "0.03"}, "host_s", "host", None),
    "rare stragglers": ({"RARE": "0.02"}, "slow_steps_s", "rare", None),
    "large gradients": ({"H": "1024", "SYNC": "1"}, "communication_s", "transfer", None),
    "slow link": (
        {"H": "512", "SYNC": "1", "LINK": "400mbit"}, "communication_s", "transfer", None
    ),
    "slow link, ddp": ({"H": "512", "LINK": "400mbit"}, "transfer", "communication", None),
}  # fmt: skip


def run(folder: Path, planted: dict[str, str], why: int = 5, steps: int = STEPS) -> Any:
    """Run the program on two ranks; return what each said, and its breakdown."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(PROGRAM)
    env = {**environment(), **planted, "STEPS": str(steps), "TRUTH": str(folder / "truth")}
    env |= {"JOBKIT_WHY": str(why), "JOBKIT_RUN_DIR": str(folder)}
    words = [sys.executable, *TWO_RANKS, str(folder / "train.py")]
    if rate := planted.get("LINK"):  # a network of its own, whose loopback is throttled
        slow = f"tc qdisc add dev lo root tbf rate {rate} burst 256k latency 50ms"
        line = f"ip link set lo up && {slow} && {shlex.join(words)}"
        words = ["unshare", "-rn", "sh", "-c", line]
    if "GLOO_SOCKET_IFNAME" in planted:
        python = [sys.executable, str(folder / "train.py")]
        words = ["unshare", "-rn", "sh", "-c", TWO_NETWORKS, "sh", *python]
    subprocess.run(words, env=env, check=True, timeout=600, stdout=subprocess.DEVNULL)
    said = [json.loads((folder / f"truth.{rank}").read_text()) for rank in range(2)]
    ran = Ran([], [], [], folder / "metrics")
    windows = [*ran.records("window", 0), *ran.records("window", 1)]
    return said, breakdown([*ran.whys(0), *ran.whys(1)], windows)


def planted_causes(work: Path, only: list[str]) -> int:
    """The table of planted causes."""
    _, none = run(work / "run", {})
    print("| planted | truth (ms) | said (ms) | late | off by | held | typical step (ms) |")
    print("|---|---|---|---|---|---|---|")
    figures: Figures = {}
    for name, (planted, column, true, who) in CASES.items():
        if only and name not in only:
            continue
        said, found = run(work / "run", planted)
        named = (found["late_rank"], found["late_cause"]) if "late_s" in found else None
        found["transfer"] = found["communication_s"] - found["waiting_s"]
        value = right = 0.0
        if column:  # seconds of a step that were planted: of the late rank, of both, or a mean
            truths = [one["truth"][true] for one in said]
            right = {"late": max, "rare": sum}.get(true, statistics.fmean)(truths)
            value = found[column]
        if column in ("host_s", "slow_steps_s"):  # planted beside it
            value -= none[column]
        if name == "slow loader on rank 1":
            right = said[1]["truth"]["data"] - said[0]["truth"]["data"]
        off = abs(value - right)
        late = "rank {}, {}".format(*named) if named else "-"
        held = named == who and (off <= 0.15 * right or off <= 0.002)
        figures[f"{name}: off by (ms)"] = 1e3 * off
        step = 1e3 * statistics.fmean(one["step_s"] for one in said)
        cells = [name, *(f"{1e3 * x:.1f}" for x in (right, value)), late, f"{1e3 * off:.1f}"]
        print("|", " | ".join([*cells, "yes" if held else "NO", f"{step:.1f}"]), "|", flush=True)
    return report(figures)


def overhead(work: Path, seconds: float, pairs: int) -> int:
    """The time of the program with and without the profiled steps."""
    (said, *_), _ = run(work / "run", {}, why=0, steps=200)
    steps = int(seconds / said["step_s"])
    ratios = []
    for turn in range(pairs):
        order = (0, 5) if turn % 2 else (5, 0)
        walls = {why: run(work / "run", {}, why, steps)[0][0]["wall_s"] for why in order}
        ratios.append(walls[5] / walls[0])
        print(f"{walls[0]:.1f} s without, {walls[5]:.1f} s with: {ratios[-1]:.4f}", flush=True)
    return report({"time with / without": statistics.median(ratios)})


# Remedy: cause, the program without it, what is changed.
REMEDIES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "larger batch (x4), per sample": ("communication", {"H": "1024"}, {"BATCH": "64"}),
    "bf16 hook, on a slow link": (
        "communication", {"H": "512", "LINK": "400mbit"}, {"BF16": "1"}
    ),
    "buckets of 1 MiB in place of 25": ("communication", {"H": "1024"}, {"BUCKET": "1"}),
    "two loader workers": ("data wait", {"DATA": "0.002"}, {"WORKERS": "2"}),
    "cores of its own for each rank": ("compute", {"H": "512", "CORES": "0,0"}, {"CORES": "0,1"}),
    "the faster of two networks": (
        "communication", {"H": "512", "GLOO_SOCKET_IFNAME": "net0"}, {"GLOO_SOCKET_IFNAME": "net1"}
    ),
    "leave the slow node out": ("late rank", {"LATE": "0.04"}, {"LATE": "0"}),
}  # fmt: skip


def remedies(work: Path, only: list[str]) -> int:
    """What each change gains: the second half of the steps, alternating."""
    print("| cause | change | before (ms a step) | after | gain |\n|---|---|---|---|---|")
    figures: Figures = {}
    for name, (cause, planted, change) in REMEDIES.items():
        if only and name not in only:
            continue
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2):
            for changed in (bool(turn), not turn):
                env = {**planted, **(change if changed else {})}
                said, _ = run(work / "run", env, why=0, steps=60)
                per = 4 if changed and "BATCH" in change else 1
                times[changed].append(statistics.fmean(one["last_s"] for one in said) / per)
        before, after = (1e3 * min(times[c]) for c in (False, True))
        figures[name] = before / after
        cells = [cause, name, f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}x"]
        print("|", " | ".join(cells), "|", flush=True)
    return report(figures)


TRACEML = (  # what its quick start asks of a loop: three lines
    ("rank = dist", "import traceml_ai as traceml; traceml.init(mode='auto'); rank = dist"),
    ("    optimizer.zero", "    with traceml.trace_step(model): optimizer.zero"),
)


def peers(work: Path, python: str, only: list[str]) -> int:
    """What jobkit, TraceML (with its lines in the loop) and HTA say of the planted causes."""
    print("| planted | jobkit | TraceML: verdict | TraceML: why | HTA |\n|---|---|---|---|---|")
    code = (
        "import sys; from hta.trace_analysis import TraceAnalysis as T\n"
        "t = T(trace_files={0: sys.argv[1], 1: sys.argv[2]})\n"
        "print(t.get_temporal_breakdown(visualize=False).to_csv())\n"
    )
    program = PROGRAM
    for old, new in TRACEML:
        program = program.replace(old, new, 1)
    (work / "train.py").write_text(program)
    for name in only or list(CASES)[:7]:
        planted = CASES[name][0]
        _, found = run(work / "run", planted)
        parts = "compute", "communication", "waiting", "data_wait", "host", "slow_steps"
        shares = [f"{part} {found[f'{part}_s'] / found['iteration_s']:.0%}" for part in parts]
        ours = ", ".join(shares)
        if "late_s" in found:
            ours += f"; rank {found['late_rank']}: {1e3 * found['late_s']:.1f} ms, "
            ours += found["late_cause"]
        traces = [str(work / "run" / "traces" / f"why.rank{rank}.json.gz") for rank in range(2)]
        hta = output([python, "-c", code, *traces]).splitlines()[-1]
        env = {**os.environ, **planted, "STEPS": str(STEPS), "TRUTH": str(work / "t")}
        words = [str(Path(python).with_name("traceml")), "run", str(work / "train.py")]
        words += ["--nproc-per-node", "2", "--mode", "summary"]
        said = output(words, env=env, cwd=work)
        verdict, why = (
            " ".join(line.split(word)[1].strip(" |") for line in said.splitlines() if word in line)
            for word in ("Verdict:", "Why:")
        )
        print("|", " | ".join((name, ours, verdict, why, hta)), "|", flush=True)
    return 0


def output(words: list[str], **options: Any) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, **options)
    return (done.stdout + done.stderr).strip()


def main() -> int:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "what", nargs="?", default="causes",
        choices=("causes", "overhead", "remedies", "peers"),
    )  # fmt: skip
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if args.what == "overhead":
            return overhead(work, args.seconds, args.pairs)
        if args.what == "peers":
            return peers(work, args.python, args.only)
        return {"causes": planted_causes, "remedies": remedies}[args.what](work, args.only)


if __name__ == "__main__":
    raise SystemExit(main())
