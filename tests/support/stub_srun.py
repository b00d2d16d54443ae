"""run.sh where srun is a stub, which starts the tasks of one node of a step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.place import ROOT, script

RUN = ROOT / "run.sh"
# Starts the tasks of one node of a step, as srun does; its own options are noted.
SRUN = r"""#!/usr/bin/env bash
tasks=1
while [[ $1 == -* ]]; do
  echo "$1" >> "$NOTES"
  [[ $1 == --ntasks=* ]] && tasks=${1#*=}
  shift
done
export SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=$tasks SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE="$tasks"
export SLURM_STEP_NODELIST='nid[007-008,011]-ib,m4'
pids=() worst=0
for ((t = 0; t < tasks; t++)); do
  SLURM_PROCID=$t SLURM_LOCALID=$t "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit "$worst"
"""
JOB = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1"}


class Kit:
    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.run_dir = folder / "my $(id) 100% run's"
        self.tool("srun", SRUN)
        self.tool("scontrol", '#!/bin/sh\necho "$@" >> "$NOTES"\n')

    def tool(self, name: str, text: str) -> Path:
        return script(self.folder / name, text)

    def environ(self, **extra: str) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG")}
        path = f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "NOTES": str(self.notes), "JOBKIT_HOST_PYTHON": sys.executable}
        return {**keep, **own, **extra}

    def words(self, *words: str) -> list[str]:
        return ["bash", str(RUN), "--run-dir", str(self.run_dir), *words]

    def start(self, *words: str, **extra: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.words(*words), env=self.environ(**extra), stdout=-1, text=True, cwd=self.folder
        )

    def __call__(self, *words: str, **extra: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.words(*words), env=self.environ(**extra), capture_output=True, text=True,
            timeout=600, cwd=self.folder,
        )  # fmt: skip

    def outcome(self, attempt: int = 0) -> dict[str, Any]:
        return json.loads((self.run_dir / "attempts" / str(attempt) / "outcome.json").read_text())


# Answers the question that run.sh asks before the start, then plays the launcher.
PYTHON = r"""#!/usr/bin/env bash
printf '%s\0' "$@" CALL >> "$NOTES"
case "$*" in
  -c*) exit "${NO_TORCH:-0}" ;;
esac
if [[ -n ${OUTCOME-} ]]; then
  while (($#)); do
    case $1 in --run-dir) dir=$2 ;; --attempt) n=$2 ;; esac
    shift
  done
  [[ $OUTCOME == \{* ]] || OUTCOME="{\"exit_code\": $OUTCOME, \"status\": \"x\"}"
  printf '%s\n' "$OUTCOME" > "$dir/attempts/$n/outcome.json"
fi
if [[ -n ${SLEEP-} ]]; then
  trap 'echo ended by TERM >> "$NOTES"; exit 15' TERM
  echo asleep; sleep 30 & wait
fi
exit "${CODE:-0}"
"""
# Notes its words and how cores are bound, starts nothing, and ends as it is told.
SRUN_ALONE = r"""#!/usr/bin/env bash
printf '%s\0' srun "$@" "CPU_BIND=${SLURM_CPU_BIND-none}" CALL >> "$NOTES"
exit "${CODE:-0}"
"""


class Fake(Kit):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.python = self.tool("a python", PYTHON)
        self.tool("srun", SRUN_ALONE)

    def environ(self, **extra: str) -> dict[str, str]:
        return super().environ(**{"JOBKIT_PYTHON": str(self.python), **extra})

    def calls(self) -> list[list[str]]:
        text = self.notes.read_text() if self.notes.exists() else ""
        return [call.split("\0")[:-1] for call in text.split("CALL\0")[:-1]]
