"""Programs of torch, each rank in a fork of one process that has imported it.

An import of torch costs more than all that these programs do. Under the start-up hook a fork begins
its measurement from nothing, as a rank that a program forks does.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.place import ROOT
from support.programs import AUTO, Ran, place
from support.training_programs import LEAVES

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
    if "jobkit_auto" in sys.modules: sys.modules["jobkit_auto"].hook.environment.update(rank["env"])
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
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        if auto:
            env |= {"PYTHONPATH": f"{AUTO}:{ROOT / 'src'}", "JOBKIT_AUTO": "1"}
        env |= {"JOBKIT_STUDY": "s", "JOBKIT_RUN_ID": "r", "JOBKIT_ATTEMPT": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *modules],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, program: str, *words: str, ranks: int = 1, **env: str) -> Ran:
        """Run a program's text on some ranks, as support.programs.run does."""
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
