"""Programs that nobody changed are measured on two ranks, and say where their time goes.

Loops of torch alone, and the real libraries, of which `make test` has Accelerate alone: the imports
of the others cost more than all the rest.
"""

import importlib.util
import signal
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.why import breakdown
from support import needs
from support.training_programs import LEAP, PROGRAMS
from support.warm_programs import Warm

LATE_S = 0.1
# Loops of torch alone; rank 1 is late in each step: it sleeps once rank 0 waits for it, as its
# thread being asleep for a while says. So the time of waiting does not depend on the machine.
HEAD = f"""
import os, signal, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1); dist.init_process_group("gloo"); rank = dist.get_rank()
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
loader = DataLoader(TensorDataset(torch.randn(4000, 64), torch.randint(8, (4000,))), 8)
pids = [None] * dist.get_world_size(); dist.all_gather_object(pids, os.getpid())
def asleep(): return open(f"/proc/{{pids[0]}}/stat").read().rpartition(") ")[2][0] == "S"
def late():
    seen = 0
    while rank and seen < 5:
        time.sleep(0.01); seen = seen + 1 if asleep() else 0
    time.sleep({LATE_S} * rank)
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step, (x, y) in enumerate(loader):
    if step == 24: break
    late(); optimizer.zero_grad(); nn.functional.cross_entropy(model(x), y).backward()
    after(); optimizer.step()
"""
OF_TORCH = {
    "ddp": "model = nn.parallel.DistributedDataParallel(net)\ndef after(): pass\n",
    "all-reduce": """model = net
def after():
    for p in model.parameters(): dist.all_reduce(p.grad)
""",
    "fsdp": """from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
def after(): pass
""",
}


@pytest.mark.parametrize("way", OF_TORCH)
def test_the_late_rank_is_named(tmp_path: Path, warm: Warm, way: str) -> None:
    ran = warm.run(tmp_path, HEAD + OF_TORCH[way] + LOOP, ranks=2, JOBKIT_WHY="6")
    assert (ran.codes, ran.err) == ([0, 0], ["", ""])
    late = ran.whys(1)
    found = breakdown([*ran.whys(0), *late])
    assert found["ranks"] == 2 and found["waiting_s"] >= LATE_S / 2  # the mean of both
    assert all(host >= LATE_S for *_, host in late[0]["parts"])
    # On a busy machine chance may hide it, in which case no rank is named.
    assert (found.get("late_rank", 1), found.get("late_cause", "host")) == (1, "host")


def test_what_was_measured_before_a_kill_is_there(tmp_path: Path, warm: Warm) -> None:
    killed = "\ndef after():\n    if step == 20: os.kill(os.getpid(), signal.SIGKILL)\n"
    ran = warm.run(tmp_path, HEAD + "model = net\n" + killed + LOOP, JOBKIT_WHY="4",
                   RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # fmt: skip
    assert ran.codes == [-signal.SIGKILL]
    (record,) = ran.whys(0)
    assert record["steps"] == 4


LEAP_S = 1000.0  # of each batch of evaluation, which must not count
DEAR = [pytest.param(name, marks=pytest.mark.long) for name in ("lightning", "transformers")]


@pytest.mark.parametrize("library", ["accelerate", *DEAR])
def test_a_library_is_measured_on_two_ranks(library: str, request: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        needs.unavailable(f"{library} is not installed (make venv, or pip install '.[adapters]')")
    warm = request.getfixturevalue("warm" if library == "accelerate" else "libraries")
    ran = warm.run(tmp_path, LEAP + PROGRAMS[library], ranks=2, JOBKIT_WHY="5")
    assert ran.codes == [0, 0], ran.err
    for rank in range(2):
        # 320 samples in batches of 4, of which 2 are one step, on 2 ranks, for 2 epochs: 40 steps.
        # The 7 at each of two places where steps may be profiled are not in the rate.
        assert ran.sums(rank) == (40 - 14, 8 * 26), ran.out
        windows = ran.records("window", rank)
        wall = sum(w["wall_s"] for w in windows if not w["warmup"])
        assert wall < LEAP_S, "a batch of evaluation is in the time"
        assert sum(w["paused_s"] for w in windows) >= LEAP_S
        assert all(w["data_wait_s"] <= w["wall_s"] for w in windows)
    found = breakdown([*ran.whys(0), *ran.whys(1)])
    assert found["ranks"] == 2 and ran.whys(0)[0]["steps"] == 5
    assert min(found[f"{name}_s"] for name in ("compute", "communication", "data_wait", "host")) > 0
    assert "gloo:all_reduce" in {name for _, name, *_ in ran.whys(0)[0]["collectives"]}
    start = ran.records("run_start")[0]
    assert (start["source"], start["unit"], start["world_size"]) == ("auto", "samples", 2)
    assert ["[METRIC]" in out for out in ran.out] == [True, False]
