"""A Slurm of scripts that takes a limited number of jobs, and what tests ask of its jobs."""

import json
from dataclasses import dataclass
from pathlib import Path

from jobkit.launch.slurm.rest import Rest
from jobkit.launch.states import States
from support.fake_study import FakeRun

# Takes an array where all its elements are free: the file free has how many. The ids count from 1.
SBATCH = """#!/usr/bin/env bash
script=$(cat); echo "$1" >> calls
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' <<< "$script")
left=$(($(cat free) - ${last:-0} - 1))
if [ $left -lt 0 ]; then
  echo "sbatch: error: Batch job submission failed: Job violates policy (job submit limit)" >&2
  exit 1
fi
[ "$1" = --test-only ] && exit
echo $left > free; number=$(($(cat count 2>/dev/null) + 1)); echo $number > count
echo "$script" > $number.script; echo $number
"""
# Says of the jobs what the file queue has.
SQUEUE = "#!/bin/sh\ncat queue 2>/dev/null || exit 1\n"
RUNS = 5


@dataclass
class Clock:
    """A monotonic clock that goes on by itself at each look: no pause is left to wait for."""

    now: float = 1000.0
    step: float = 100.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


def free(slurm: Path, number: int) -> None:
    (slurm / "free").write_text(f"{number}\n")


def taken(started: tuple[Rest, States]) -> list[str]:
    """The runs that Slurm took."""
    rest, states = started
    return [run_id for run_id in states.plan.runs if run_id not in rest.left]


def job_of(states: States, run_id: str) -> str:
    return str(json.loads(states.plan.paths.run(run_id).submission.read_text())["job_id"])


def failed(states: States, run_id: str, code: int) -> None:
    """Let the run record its failure."""
    FakeRun(states.plan.paths.folder, run_id, states.plan.runs[run_id]).begin().end(
        "failed", "", code
    )


def collectors(slurm: Path) -> list[str]:
    """The scripts of jobs that collect."""
    texts = [path.read_text() for path in slurm.glob("*.script")]
    return [text for text in texts if "--job-name=s-collect" in text]
