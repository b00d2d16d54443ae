"""run.sh on several machines without Slurm: two nodes on addresses of the loopback interface."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobkit.launch.kubernetes import KubernetesOptions, manifest
from jobkit.spec.study import Study
from support.place import ROOT

# Each test has an address of its own, so that no other program has its port.
_OWN = f"127.{1 + os.getpid() // 256 % 250}.{os.getpid() % 256}"
_ADDRESSES = (f"{_OWN}.{n}" for n in itertools.count(1))
# "ready" once the handlers are there; a checkpoint, so to say, on TERM; 75 on the stop signal.
WAITS = """
trap 'touch "$JOBKIT_RUN_DIR/saved-$RANK"; exit 0' TERM
trap 'exit 75' USR2
touch "$JOBKIT_RUN_DIR/ready-$RANK"
while :; do sleep 0.02; done
"""
SAVES = WAITS.replace("exit 0' TERM", "exit 75' TERM")


class Machines:
    """Two nodes of a run, started and watched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, next(_ADDRESSES)
        self.nodes: dict[int, subprocess.Popen[str]] = {}

    def start(self, node: int, *words: str, **env: str) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.nodes[node] = subprocess.Popen(
            ["bash", str(ROOT / "run.sh"), *words],
            env={**os.environ, "PATH": path, "JOBKIT_LOGS": str(self.folder), **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start_both(self, *words: str, ranks: tuple[int, int] = (2, 2), port: int = 29500) -> None:
        for node in (1, 0):  # which of them comes first does not matter
            own = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", self.address]
            own += ["--master-port", str(port - node * (port != 29500))]
            self.start(node, *own, "--nproc-per-node", str(ranks[node]), *words)

    def ends(self) -> tuple[list[int], str, str]:
        """Codes of node 0 and 1, all that they printed, all that they complained of."""
        said = [self.nodes[node].communicate(timeout=480) for node in (0, 1)]
        codes = [self.nodes[node].returncode for node in (0, 1)]
        return codes, "".join(o for o, _ in said), "".join(e for _, e in said)

    def run_dir(self) -> Path:
        (found,) = (self.folder / "single").iterdir()
        return found

    def outcome(self, attempt: int = 0) -> dict[str, Any]:
        path = self.run_dir() / "attempts" / str(attempt) / "outcome.json"
        return json.loads(path.read_text())

    def until_ready(self) -> None:
        deadline = time.monotonic() + 480
        while len(list(self.folder.glob("single/*/ready-*"))) < 4:
            assert time.monotonic() < deadline, "the ranks have not started"
            time.sleep(0.05)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for process in made.nodes.values():
        process.kill()
        process.wait()


def test_ranks_count_over_the_nodes(machines: Machines) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
    shown = " ".join(f"${name}" for name in names)
    machines.start_both("--", "bash", "-c", f'echo "has {shown}"; echo "port $MASTER_PORT"')
    codes, out, err = machines.ends()
    assert codes == [0, 0], err
    places = sorted(line for line in out.splitlines() if line.startswith("has"))
    assert places == [f"has {r} {r % 2} 4 2 {r // 2} {machines.address}" for r in range(4)]
    assert len({line for line in out.splitlines() if line.startswith("port")}) == 1
    assert machines.outcome()["status"] == "ok"
    spec = json.loads((machines.run_dir() / "spec.json").read_text())["spec"]
    assert (spec["nodes"], spec["ranks_per_node"]) == (2, 2)


def test_a_node_that_fails_ends_all_and_all_start_again(machines: Machines) -> None:
    text = "[[ $RANK$JOBKIT_ATTEMPT != 30 ]] || exit 3; (($JOBKIT_ATTEMPT)) || exec sleep 300"
    machines.start_both("--max-restarts", "1", "--", "bash", "-c", text)
    codes, _, err = machines.ends()
    assert codes == [0, 0], err
    assert (machines.outcome(0)["status"], machines.outcome(0)["exit_code"]) == ("failed", 3)
    assert machines.outcome(0)["reason"] == "rank 3: exit code 3"
    assert machines.outcome(1)["status"] == "ok"
    assert "node 1: exit code 3: ending all nodes" in err


@pytest.mark.parametrize(
    ("node", "signum", "code"),
    [(0, signal.SIGTERM, 143), (1, signal.SIGINT, 130), (1, signal.SIGUSR2, 75)],
)
def test_a_signal_to_one_node_is_one_to_all(
    machines: Machines, node: int, signum: signal.Signals, code: int
) -> None:
    machines.start_both("--", "bash", "-c", WAITS)
    machines.until_ready()
    machines.nodes[node].send_signal(signum)
    codes, _, err = machines.ends()
    assert codes == [code, code], err
    saved = {path.name for path in machines.run_dir().glob("saved-*")}
    assert saved == (set() if code == 75 else {f"saved-{rank}" for rank in range(4)})
    assert code != 75 or machines.outcome()["status"] == "preempted"


def test_the_pods_of_a_job_save_and_end_with_75_where_one_is_evicted(machines: Machines) -> None:
    """With the words and the environment of the manifest, as the kubelet expands them."""
    study = Study.of_command(("bash", "-c", SAVES), gpus=("2x2",), name="pods")
    (spec,) = study.expand().runs.values()
    text = manifest("pods", "single/run", spec, KubernetesOptions(image="i"), 3)
    (box,) = list(yaml.safe_load_all(text))[-1]["spec"]["template"]["spec"]["containers"]
    logs = str(machines.folder)
    env = {v["name"]: v["value"].replace("/runs", logs) for v in box["env"] if v["name"] != "HOME"}
    for index in (1, 0):
        places = {"$(JOB_COMPLETION_INDEX)": str(index), "pods-0.pods": machines.address}
        words = [places.get(w, w.replace("/runs", logs)) for w in box["args"]]
        machines.start(index, *words, **env)
    machines.until_ready()
    machines.nodes[1].send_signal(signal.SIGTERM)
    codes, _, err = machines.ends()
    assert codes == [75, 75], err
    assert machines.outcome()["status"] == "preempted"


def test_a_node_that_is_lost_ends_the_other(machines: Machines) -> None:
    machines.start_both("--", "bash", "-c", WAITS)
    machines.until_ready()
    machines.nodes[0].kill()  # node 1's part; its ranks are left, as the machine is not gone
    given = f"JOBKIT_NODES_RUN_DIR={machines.run_dir()}\0".encode()
    try:
        code, err = machines.nodes[1].wait(120), machines.nodes[1].communicate()[1]
        assert code == 1 and "node 0 was lost" in err
        assert {p.name for p in machines.run_dir().glob("saved-*")} >= {"saved-2", "saved-3"}
    finally:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if given in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGTERM)


def test_nodes_of_different_sizes_are_refused(machines: Machines) -> None:
    machines.start_both("--", "true", ranks=(1, 2))
    codes, _, err = machines.ends()
    assert codes == [2, 2]
    assert err.count("node 1 starts 2 rank(s), and node 0 1: give the same --nproc-per-node") == 2
    assert not (machines.folder / "single").exists()


def test_a_node_that_does_not_come_is_one_line(machines: Machines) -> None:
    machines.start_both("--start-timeout", "0.3", "--", "true", ranks=(1, 1), port=29499)
    codes, _, err = machines.ends()
    assert codes == [1, 1] and err.count("\n") == 2
    assert "node 1 of 2 did not come" in err and "node 0 does not answer" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nnodes 2", "needs --node-rank"),
        ("--node-rank 1", "need --nnodes"),
        ("--nnodes 2 --node-rank 2 --master-addr h", "below --nnodes"),
        ("--nnodes 2 --node-rank 0 --master-addr 192.0.2.1", "not an address"),
        ("--nnodes=2 --node-rank=0 --master-addr=h --launcher=once", "--launcher once"),
        ("--shutdown-timeout x", "--shutdown-timeout x: must be"),
    ],
)
def test_bad_values_are_one_line_and_2(machines: Machines, words: str, said: str) -> None:
    machines.start(0, "--nproc-per-node", "1", *words.split(), "--", "true")
    _, err = machines.nodes[0].communicate(timeout=300)
    assert machines.nodes[0].returncode == 2 and said in err, err
    assert err.count("\n") == 1 and not list(machines.folder.iterdir())
