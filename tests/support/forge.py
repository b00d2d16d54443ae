"""Starts ranks of the payload within a second: a process that has imported torch forks them.

    python forge.py      reads one JSON request a line, answers with one JSON line each

A request has world, argv, out (ranks write to OUT.<rank>), env, cwd, timeout_s. The answer is the
list of exit codes, None for a rank that had to be killed when the time was up. The forge itself
never computes: its children have no threads of its to miss.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import torch
import torch._dynamo  # what fully_shard would import, a second each time
import torchvision.models  # noqa: F401

from jobkit.payload import run  # noqa: F401
from jobkit.payload.main import leave, main


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_rank(rank: int, port: int, request: dict[str, Any]) -> None:
    """Become one rank; never returns."""
    world = request["world"]
    os.setpgid(0, 0)
    os.environ.update(request.get("env", {}), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    out = os.open(f"{request['out']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(request.get("cwd", "."))
    sys.path.insert(0, "")
    try:
        code = main(request["argv"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 99
    leave(code)


def wait(pids: list[int], timeout_s: float) -> list[int | None]:
    """The exit codes of children, negative for a signal; the late ones are killed."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in (p for p in pids if p not in codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def serve() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        port, pids = free_port(), []
        for rank in range(request["world"]):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, port, request)
            pids.append(pid)
        print(json.dumps(wait(pids, request.get("timeout_s", 900))), flush=True)


if __name__ == "__main__":
    serve()
