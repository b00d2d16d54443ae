"""Programs of users, run as the ranks of a study's run, and the records that they leave.

An import of torch costs more than all that these programs do: so each rank is a fork of one process
that has imported it. Under the start-up hook a fork begins its measurement from nothing, as a rank
that a program forks does.
"""

import json
import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from jobkit.metric.kinds import Record
from jobkit.metric.reader import read_file
from support.place import ROOT
from support.training_programs import LEAVES

AUTO = ROOT / "src" / "jobkit" / "program" / "auto"


@dataclass
class Ran:
    """What the ranks of a program left."""

    codes: list[int]
    out: list[str]
    err: list[str]
    metrics: Path

    def records(self, kind: str, rank: int = 0) -> list[Record]:
        """The records of a kind in a rank's file; every line of the file must be one."""
        path = self.metrics / (f"0.r{rank}.jsonl" if rank else "0.jsonl")
        if not path.exists():
            return []
        with path.open("rb") as file:
            found = list(read_file(file))
        assert all(isinstance(record, dict) for record in found), found
        return [r for r in found if isinstance(r, dict) and r["kind"] == kind]

    def sums(self, rank: int = 0) -> tuple[int, float]:
        """Steps and work of all windows of a rank."""
        windows = self.records("window", rank)
        return sum(w["steps"] for w in windows), sum(w["work"] or 0 for w in windows)


def environment(auto: bool) -> dict[str, str]:
    """What a study gives the one rank of a run; auto: with the start-up hook."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if auto:
        env |= {"PYTHONPATH": f"{AUTO}:{ROOT / 'src'}", "JOBKIT_AUTO": "1"}
    env["JOBKIT_WHY"] = "0"  # most are too short for it
    return env | {"JOBKIT_STUDY": "s", "JOBKIT_RUN_ID": "r", "JOBKIT_ATTEMPT": "0"}


def run(folder: Path, program: str, **env: str) -> Ran:
    """Run a program's text under the start-up hook, in a Python of its own that imports torch."""
    (folder / "train.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "train.py"],
        env={**environment(auto=True), "JOBKIT_RUN_DIR": str(folder / "run"), **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    return Ran([done.returncode], [done.stdout], [done.stderr], folder / "run" / "metrics")


def place(ranks: int) -> list[dict[str, str]]:
    """The variables that each rank is given; a program alone is given none."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    group = {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


# Forks for each rank of each line that it reads; the fork runs the program, and then what is to
# run at exit.
_SERVER = """
import atexit, gc, importlib, json, os, runpy, signal, sys
import torch, torch.optim, torch.utils.data, torch._dynamo
for name in sys.argv[1:]: importlib.import_module(name)

def run(wanted, rank):
    out, err = (os.open(path, os.O_WRONLY | os.O_CREAT) for path in rank["outputs"])
    os.dup2(out, 1); os.dup2(err, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(rank["env"])
    if auto := sys.modules.get("jobkit_auto.hook"): auto.hook.environment.update(rank["env"])
    os.chdir(wanted["folder"])
    sys.path[0], sys.argv = wanted["folder"], [wanted["script"], *wanted["words"]]
    runpy.run_path(wanted["script"], run_name="__main__")

gc.freeze()  # a collection would copy every page of it
for line in iter(sys.stdin.readline, ""):
    wanted, children = json.loads(line), []
    for rank in wanted["ranks"]:
        child = os.fork()
        if child == 0:
            signal.alarm(1200)  # where the other rank has died before the rendezvous
            run(wanted, rank)  # an error ends the fork with its traceback
            atexit._run_exitfuncs()
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(0)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(ends), flush=True)
"""


class Warm:
    """The process, which ends with its standard input; auto: under the start-up hook."""

    def __init__(self, *modules: str, auto: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *modules],
            env=environment(auto),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, program: str, *words: str, ranks: int = 1, **env: str) -> Ran:
        """Run a program's text on some ranks, with the environment that a study gives them."""
        script, text = folder / "train.py", textwrap.dedent(program)
        script.write_text(LEAVES + text if ranks > 1 else text)
        own = {"JOBKIT_RUN_DIR": str(folder / "run"), **env}
        outputs = [[folder / f"out.{rank}", folder / f"err.{rank}"] for rank in range(ranks)]
        each = [
            {"env": {**own, **where}, "outputs": list(map(str, both))}
            for where, both in zip(place(ranks), outputs, strict=True)
        ]
        asked = {"folder": str(folder), "script": str(script), "words": words, "ranks": each}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        out, err = ([both[i].read_text() for both in outputs] for i in (0, 1))
        return Ran(codes, out, err, folder / "run" / "metrics")

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=300)
