"""run.sh on several machines without Slurm: two of them here, which share a folder or do not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobkit.launch.kubernetes import TEMPLATE, KubernetesOptions, manifest, read_template
from jobkit.spec.study import Study
from support.place import ROOT, until

# As a program whose ranks agree: on TERM or the stop signal of one of them all save and end.
AGREES = """
trap 'touch "$JOBKIT_RUN_DIR/stop"' TERM USR2
touch "$JOBKIT_RUN_DIR/ready-$RANK"
until [[ -e $JOBKIT_RUN_DIR/stop ]]; do sleep 0.05; done
exit 75
"""
# As a program whose ranks lose the one that crashed: in the first attempt only.
CRASHES = f"""
if ((JOBKIT_ATTEMPT)); then {AGREES} fi
[[ $RANK == 3 ]] && exit 3
until [[ -e $JOBKIT_RUN_DIR/attempts/0/failed ]]; do sleep 0.05; done
exit 1
"""


class Machines:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.started: dict[int, subprocess.Popen[str]] = {}

    def start(self, machine: int, *words: str, **env: str) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "JOBKIT_LOGS": str(self.folder / f"logs-{machine}")}
        self.started[machine] = subprocess.Popen(
            ["bash", str(ROOT / "run.sh"), *words], env={**os.environ, **own, **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start_both(self, *words: str) -> None:
        own = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--run-dir", str(self.run_dir)]
        for machine in (1, 0):  # which of them comes first does not matter
            self.start(machine, *own, "--node-rank", str(machine), "--nproc-per-node=2", *words)

    def ends(self) -> tuple[list[int], str, str]:
        """Codes of machine 0 and 1, all that they printed, all that they complained of."""
        texts = [self.started[machine].communicate(timeout=600) for machine in (0, 1)]
        codes = [self.started[machine].returncode for machine in (0, 1)]
        return codes, "".join(o for o, _ in texts), "".join(e for _, e in texts)

    def outcome(self, attempt: int = 0) -> dict[str, Any]:
        return json.loads((self.run_dir / f"attempts/{attempt}/outcome.json").read_text())

    def until_ready(self) -> None:
        until(lambda: len(list(self.run_dir.glob("ready-*"))) == 4, "the start of the ranks")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for process in made.started.values():
        process.terminate()
        process.wait(300)


def test_ranks_count_over_the_machines(machines: Machines) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
    shown = " ".join(f"${name}" for name in [*names, "MASTER_PORT"])
    machines.start_both("--master-port", "29417", "--", "bash", "-c", f'echo "has {shown}"')
    codes, out, err = machines.ends()
    assert codes == [0, 0], err
    places = sorted(line for line in out.splitlines() if line.startswith("has"))
    assert places == [f"has {r} {r % 2} 4 2 {r // 2} 127.0.0.1 29417" for r in range(4)]
    assert machines.outcome()["status"] == "ok"
    assert [p.name for p in (machines.run_dir / "attempts").iterdir()] == ["0"]
    spec = json.loads((machines.run_dir / "spec.json").read_text())["spec"]
    assert (spec["nodes"], spec["ranks_per_node"]) == (2, 2)


def test_a_crash_is_started_again_on_both_and_a_stop_signal_to_one_ends_both(machines) -> None:
    """In the second attempt, which both begin together."""
    machines.start_both("--max-restarts", "1", "--", "bash", "-c", CRASHES)
    machines.until_ready()
    machines.started[1].send_signal(signal.SIGUSR2)
    codes, _, err = machines.ends()
    assert codes == [75, 75], err
    first, second = machines.outcome(0), machines.outcome(1)
    assert (first["status"], first["exit_code"]) == ("failed", 3)
    assert first["reason"] == "rank 3: exit code 3"
    assert second["status"] == "preempted" and second["reason"].endswith(": exit code 75")
    assert err.count("attempt 0 ended with code 3: starting the run again (1 of 1)") == 2
    assert not (machines.run_dir / "attempts" / "2").exists()


def test_a_rank_that_is_killed_with_its_shell_fails_the_run_of_both(machines: Machines) -> None:
    text = "[[ $RANK == 3 ]] && kill -9 0; until grep -qs ^137 $JOBKIT_RUN_DIR/attempts/0/failed"
    machines.start_both("--", "bash", "-c", f"{text}; do sleep 0.05; done")
    assert machines.ends()[0] == [137, 137]
    assert machines.outcome()["reason"] == "ended by SIGKILL"


def test_how_the_pods_of_a_job_end(machines: Machines) -> None:
    """With the words and the environment of the manifest, as the kubelet expands them.

    A pod is evicted by TERM: all end with 75 where there is a checkpoint.
    """
    study = Study.of_command(("bash", "-c", AGREES), gpus=("2x2",), name="pods")
    (spec,) = study.expand().runs.values()
    options = KubernetesOptions(image="i")
    document = manifest(read_template(TEMPLATE), "pods", "run", spec, options, 3)
    (box,) = list(yaml.safe_load_all(document))[-1]["spec"]["template"]["spec"]["containers"]
    top = str(machines.folder)
    env = {v["name"]: v["value"].replace("/runs", top) for v in box["env"] if v["name"] != "HOME"}
    for index in (1, 0):
        places = {"$(JOB_COMPLETION_INDEX)": str(index), "pods-0.pods": "127.0.0.1"}
        expanded = [places.get(w, w.replace("$$(", "$(")) for w in box["args"]]
        words = [word.replace("/runs", top) for word in expanded]
        machines.start(index, *words, **env)
    machines.until_ready()
    machines.started[1].send_signal(signal.SIGTERM)
    codes, _, err = machines.ends()
    assert codes == [75, 75], err
    assert machines.outcome()["status"] == "preempted"


def test_a_machine_0_that_does_not_come_is_one_line(machines: Machines) -> None:
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--start-timeout", "1"]
    machines.start(1, *words, "--run-dir", str(machines.run_dir), "--", "true")
    _, err = machines.started[1].communicate(timeout=300)
    assert machines.started[1].returncode == 1 and err.count("\n") == 1
    assert "machine 0 has begun no attempt in" in err
