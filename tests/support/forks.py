"""Ranks that start within a second: a process that has imported torch forks them.

    python forks.py MODULE...    imports these, reads one JSON request a line, answers with one each

A request has argv, folder, timeout_s, and for each rank its variables and the files of its output.
The answer is the list of exit codes, negative for a signal, None for a rank that had to be killed
when the time was up. The process itself never computes: forks have no threads of its to miss.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def places(ranks: int) -> list[dict[str, str]]:
    """The variables by which each rank of one machine finds its place."""
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    group = {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class Forks:
    """The process, which ends with its standard input."""

    def __init__(self, *modules: str, env: Mapping[str, str]) -> None:
        words = [sys.executable, __file__, *modules]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True)

    def fork(self, argv: list, folder: Path, ranks: list, timeout_s: float = 1200.0) -> list[Any]:
        """Run a script in a folder; ranks: variables and files of output."""
        request = {"argv": argv, "folder": folder, "ranks": ranks, "timeout_s": timeout_s}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request, default=str) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate(timeout=300)


def become(argv: list[str], folder: str, env: dict[str, str], outputs: list[str]) -> None:
    """Be a rank to the end; an error ends the fork with its traceback."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(env)
    if auto := sys.modules.get("jobkit_auto.hook"):
        auto.hook.environment.update(env)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wait(pids: list[int], timeout_s: float) -> list[int | None]:
    """The exit codes of children; the late ones are killed."""
    codes, end = list[int | None](), time.monotonic() + timeout_s
    for pid in pids:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.01)
        codes.append(os.waitstatus_to_exitcode(ended[1]) if ended[0] else None)
        if codes[-1]:  # the others may wait in NCCL, which does not notice that a process is gone
            end = min(end, time.monotonic() + 60)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def serve() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # a collection would copy every page of it
    for line in iter(sys.stdin.readline, ""):
        request, pids = json.loads(line), []
        for env, *outputs in request["ranks"]:
            pid = os.fork()
            if pid == 0:
                become(request["argv"], request["folder"], env, outputs)
            pids.append(pid)
        print(json.dumps(wait(pids, request["timeout_s"])), flush=True)


if __name__ == "__main__":
    serve()
