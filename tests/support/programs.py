"""Programs of users, run as the ranks of a study's run, and the records that they leave."""

import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from jobkit.metric.line import Record
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


def run(
    folder: Path, program: str, *words: str, ranks: int = 1, auto: bool = True, **env: str
) -> Ran:
    """Run a program's text on some ranks, with the environment that a study gives them."""
    script = folder / "train.py"
    text = textwrap.dedent(program)
    script.write_text(LEAVES + text if ranks > 1 else text)
    given = {
        **os.environ,
        "PYTHONPATH": f"{AUTO}:{ROOT / 'src'}" if auto else str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "JOBKIT_RUN_DIR": str(folder / "run"),
        "JOBKIT_STUDY": "s",
        "JOBKIT_RUN_ID": "r",
        "JOBKIT_ATTEMPT": "0",
        **({"JOBKIT_AUTO": "1"} if auto else {}),
        **env,
    }
    started = []
    for own in place(ranks):
        started.append(
            subprocess.Popen(
                [sys.executable, str(script), *words],
                env={**given, **own},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ends = [process.communicate(timeout=1200) for process in started]
    codes = [process.returncode for process in started]
    return Ran(codes, [o for o, _ in ends], [e for _, e in ends], folder / "run" / "metrics")


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
