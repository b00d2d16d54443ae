"""torchrun's agent on one node of Slurm: handed as text to the command's Python, without jobkit.

    python -c TEXT RANKS WORDS...

The agents meet at the first node (c10d).
"""

import os
import pathlib
import re
import runpy
import signal
import sys


def hand_on(number, frame):  # type: ignore[no-untyped-def]
    """Send a signal to the ranks: torchrun would end of it.

    They have sessions of their own, so no signal to the agent's process group reaches them.
    """
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        try:
            for pid in map(int, path.read_text().split()):
                if os.getsid(pid) != os.getsid(0):
                    os.kill(pid, number)
        except OSError:  # it has just ended
            pass


def first_host(nodes):  # type: ignore[no-untyped-def]
    """The first host of a Slurm list such as n[1-3,7]-ib,m4: a container has no scontrol."""
    host, part = "", re.match(r"([^][,]*)(?:\[(\d+)[^]]*\])?", nodes)
    while part and part.group():
        host += part.group(1) + (part.group(2) or "")
        nodes = nodes[part.end() :]
        part = re.match(r"([^][,]*)(?:\[(\d+)[^]]*\])?", nodes)
    return host


for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hand_on)
env, ranks = os.environ, int(sys.argv[1])
suffix, node = env.get("JOBKIT_INTERFACE_SUFFIX", ""), env["SLURM_NODEID"]
nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
master = env.pop("MASTER_ADDR", "") or first_host(nodes) + suffix
if not env.get("OMP_NUM_THREADS"):  # torchrun would set 1
    env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
# One node may load torch minutes after another, from a file system that all of them read.
meet = "is_host={},join_timeout=600,read_timeout=600".format("1" if node == "0" else "0")
words = ["--nnodes", env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"], "--node-rank", node]
words += ["--nproc-per-node", sys.argv[1], "--rdzv-backend", "c10d", "--rdzv-conf", meet]
words += ["--rdzv-id", env["SLURM_JOB_ID"] + "." + env["JOBKIT_ATTEMPT"]]
words += ["--rdzv-endpoint", master + ":" + env.pop("MASTER_PORT")]
words += ["--local-addr", (env.get("SLURMD_NODENAME") or os.uname()[1]) + suffix, "--no-python"]
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"):
    env.pop(name, None)
# torchrun reads $$ as $, and $local_rank as a name of its env.
sys.argv = ["torchrun", *words, *(word.replace("$", "$$") for word in sys.argv[2:])]
try:
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
except Exception as error:
    ended_by = getattr(error, "sigval", None)
    if ended_by is None:
        raise
    sys.exit(128 + ended_by)  # as any program that a signal ended: torchrun has handed it on
