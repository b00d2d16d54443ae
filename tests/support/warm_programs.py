"""Programs of torch, each in a fork of one process that has imported it under the start-up hook.

An import of torch costs more than all that these programs do. A fork begins its measurement from
nothing, as a rank that a program forks does.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.place import ROOT
from support.programs import AUTO, Ran

# Forks for each line that it reads; the fork runs the program, and then what is to run at exit.
_SERVER = """
import atexit, gc, json, os, runpy, sys
import torch, torch.optim, torch.utils.data, torch._dynamo

def run(wanted):
    out, err = (os.open(path, os.O_WRONLY | os.O_CREAT) for path in wanted["outputs"])
    os.dup2(out, 1); os.dup2(err, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(wanted["env"])
    sys.modules["jobkit_auto"].hook.environment.update(wanted["env"])
    os.chdir(wanted["folder"])
    sys.path[0], sys.argv = wanted["folder"], [wanted["script"]]
    runpy.run_path(wanted["script"], run_name="__main__")

gc.freeze()  # a collection would copy every page of it
for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if child == 0:
        run(json.loads(line))  # an error ends the fork with its traceback
        atexit._run_exitfuncs()
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
"""


class Warm:
    """The process, which ends with its standard input."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": f"{AUTO}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
        env |= {"JOBKIT_AUTO": "1", "JOBKIT_STUDY": "s", "JOBKIT_RUN_ID": "r"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env={**env, "JOBKIT_ATTEMPT": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, program: str, **env: str) -> Ran:
        """Run a program's text as one rank, as support.programs.run does."""
        script, outputs = folder / "train.py", [folder / "out.txt", folder / "err.txt"]
        script.write_text(textwrap.dedent(program))
        own = {"JOBKIT_RUN_DIR": str(folder / "run"), **env}
        asked = {"folder": str(folder), "script": str(script), "env": own}
        assert self.process.stdin and self.process.stdout
        line = json.dumps({**asked, "outputs": [str(path) for path in outputs]})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        out, err = (path.read_text() for path in outputs)
        return Ran([code], [out], [err], folder / "run" / "metrics")

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)
