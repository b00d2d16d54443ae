"""Programs of users, run as the ranks of a study's run, and the records that they leave.

An import of torch costs more than all that these programs do: so each rank is a fork of one process
that has imported it. Under the start-up hook a fork begins its measurement from nothing, as a rank
that a program forks does.
"""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from jobkit.metric.kinds import Record
from support.forks import Forks, places
from support.place import ROOT
from support.records import records_of
from support.training_programs import LEAVES

AUTO = ROOT / "src" / "jobkit" / "program" / "auto"


@dataclass
class Ran:
    """What the ranks of a program left."""

    codes: list[int]
    out: list[str]
    err: list[str]
    metrics: Path

    def records(self, kind: str = "", rank: int = 0) -> list[Record]:
        """The records in a rank's file, all or of a kind."""
        return records_of(self.metrics / (f"0.r{rank}.jsonl" if rank else "0.jsonl"), kind)

    def whys(self, rank: int = 0) -> list[Record]:
        """What a rank's profiled steps say."""
        return records_of(self.metrics / f"0.w{rank}.jsonl")

    def sums(self, rank: int = 0) -> tuple[int, float]:
        """Steps and work of all windows of a rank."""
        windows = self.records("window", rank)
        return sum(w["steps"] for w in windows), sum(w["work"] or 0 for w in windows)


def environment() -> dict[str, str]:
    """What a study gives the one rank of a run, the start-up hook among it."""
    env = {**os.environ, "PYTHONPATH": f"{AUTO}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    env |= {"JOBKIT_AUTO": "1", "JOBKIT_WHY": "0"}  # most are too short to be profiled
    return env | {"JOBKIT_STUDY": "s", "JOBKIT_RUN_ID": "r", "JOBKIT_ATTEMPT": "0"}


def run(folder: Path, program: str, **env: str) -> Ran:
    """Run a program's text under the start-up hook, in a Python of its own that imports torch."""
    (folder / "train.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "train.py"],
        env={**environment(), "JOBKIT_RUN_DIR": str(folder / "run"), **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    return Ran([done.returncode], [done.stdout], [done.stderr], folder / "run" / "metrics")


class Warm(Forks):
    """The process, under the start-up hook."""

    def __init__(self, *modules: str) -> None:
        of_torch = ("torch.optim", "torch.utils.data", "torch._dynamo")
        super().__init__(*of_torch, *modules, env=environment())

    def run(self, folder: Path, program: str, ranks: int = 1, **env: str) -> Ran:
        """Run a program's text on some ranks, with the environment that a study gives them.

        A program alone is told nothing of ranks.
        """
        script, text = folder / "train.py", textwrap.dedent(program)
        script.write_text(LEAVES + text if ranks > 1 else text)
        own = {"JOBKIT_RUN_DIR": str(folder / "run"), **env}
        each = [
            ({**own, **place}, folder / f"out.{rank}", folder / f"err.{rank}")
            for rank, place in enumerate(places(ranks) if ranks > 1 else [{}])
        ]
        codes = self.fork([str(script)], folder, each)
        out, err = ([files[i].read_text() for _, *files in each] for i in (0, 1))
        return Ran(codes, out, err, folder / "run" / "metrics")
