"""run.sh on several machines without Slurm: two nodes on addresses of the loopback interface."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.launch.local import link
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


class Machines:
    """Two nodes of a run, started and watched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, next(_ADDRESSES)
        self.nodes: list[subprocess.Popen[str]] = []

    def start(self, *words: str, node: int, **size: Any) -> None:
        own = {"nnodes": 2, "node-rank": node, "master-addr": self.address} | {
            name.replace("_", "-"): value for name, value in size.items()
        }
        given = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.nodes.append(
            subprocess.Popen(
                ["bash", str(ROOT / "run.sh"), *given, *words],
                env={**os.environ, "PATH": path, "JOBKIT_LOGS": str(self.folder)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def start_both(self, *words: str) -> None:
        for node in (1, 0):  # which of them comes first does not matter
            self.start("--nproc-per-node", "2", *words, node=node)

    def ends(self) -> tuple[list[int], str, str]:
        """Codes of node 1 and 0, all that they printed, all that they complained of."""
        said = [process.communicate(timeout=480) for process in self.nodes]
        codes = [process.returncode for process in self.nodes]
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
    for process in made.nodes:
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
    ("node", "signum", "waits", "code", "pod"),
    [
        (1, "TERM", WAITS, 143, ""),
        (0, "INT", WAITS, 130, ""),
        (0, "USR2", WAITS, 75, ""),
        (0, "TERM", WAITS.replace("exit 0' TERM", "exit 75' TERM"), 75, "1"),
    ],
)
def test_a_signal_to_one_node_is_one_to_all(
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    node: int,
    signum: str,
    waits: str,
    code: int,
    pod: str,
) -> None:
    monkeypatch.setenv("JOBKIT_POD", pod)
    machines.start_both("--", "bash", "-c", waits)
    machines.until_ready()
    machines.nodes[1 - node].send_signal(signal.Signals[f"SIG{signum}"])
    codes, _, err = machines.ends()
    assert codes == [code, code], err
    if code == 75:
        assert machines.outcome()["status"] == "preempted"
    else:
        saved = {path.name for path in machines.run_dir().glob("saved-*")}
        assert saved == {f"saved-{rank}" for rank in range(4)}


def test_a_node_that_is_lost_ends_the_other(machines: Machines) -> None:
    machines.start_both("--", "bash", "-c", WAITS)
    machines.until_ready()
    machines.nodes[1].kill()  # node 0's part; its ranks are left, as the machine is not gone
    try:
        code, err = machines.nodes[0].wait(120), machines.nodes[0].communicate()[1]
        assert code == 1 and "node 0 was lost" in err
        assert {p.name for p in machines.run_dir().glob("saved-*")} >= {"saved-2", "saved-3"}
    finally:
        end_those_of(machines.run_dir())


def end_those_of(run_dir: Path) -> None:
    """End the processes that were given the run's folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            given = (folder / "environ").read_bytes()
        except OSError:
            continue
        if f"JOBKIT_NODES_RUN_DIR={run_dir}\0".encode() in given:
            os.kill(int(folder.name), signal.SIGTERM)


def test_nodes_of_different_sizes_are_refused(machines: Machines) -> None:
    for node in (1, 0):
        machines.start("--nproc-per-node", str(node + 1), "--", "true", node=node)
    codes, _, err = machines.ends()
    assert codes == [2, 2]
    assert err.count("node 1 starts 2 rank(s), and node 0 1: give the same --nproc-per-node") == 2
    assert not (machines.folder / "single").exists()


def test_a_node_that_does_not_come_is_one_line(machines: Machines) -> None:
    words = ["--nproc-per-node", "1", "--start-timeout", "0.3", "--", "true"]
    machines.start(*words, node=0)
    machines.start(*words, node=1, master_port=29499)
    codes, _, err = machines.ends()
    assert codes == [1, 1] and err.count("\n") == 2
    assert "node 1 of 2 did not come" in err and "node 0 does not answer" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nnodes", "2"], "needs --node-rank"),
        (["--nnodes", "2", "--node-rank", "0"], "--master-addr ''"),
        (["--node-rank", "1"], "need --nnodes"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], "below --nnodes"),
        (["--nnodes", "2", "--node-rank", "0", "--master-addr", "a b"], "--master-addr 'a b'"),
        (["--nnodes", "2", "--node-rank", "0", "--master-addr", "192.0.2.1"], "not an address"),
        (["--nnodes=2", "--node-rank=0", "--master-addr=h", "--launcher=once"], "--launcher once"),
        (["--shutdown-timeout", "x"], "--shutdown-timeout x: must be"),
    ],
)
def test_bad_values_are_one_line_and_2(tmp_path: Path, words: list[str], said: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "JOBKIT_LOGS": str(tmp_path)}
    words = ["bash", str(ROOT / "run.sh"), "--nproc-per-node", "1", *words, "--", "true"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def _join(port: int, node: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.sendall(json.dumps({"node": node, "nodes": 3, "ranks": 1}).encode() + b"\n")
    return made


@pytest.mark.parametrize("twice", [False, True])
def test_a_node_rank_is_given_once_and_may_be_started_again(twice: bool) -> None:
    own = {"node": 0, "nodes": 3, "ranks": 1}
    with link.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        if twice:
            others = [_join(port, 1), _join(port, 1)]
            with pytest.raises(UsageError, match="given twice"):
                link.meet(listener, own, time.monotonic() + 300, lambda: False)
            joined = {}
        else:
            _join(port, 1).close()
            others = [_join(port, 1), _join(port, 2)]
            joined = link.meet(listener, own, time.monotonic() + 300, lambda: False)
            names = {n: other.getsockname() for n, other in enumerate(others, 1)}
            assert {n: each.socket.getpeername() for n, each in joined.items()} == names
    for each in (*others, *joined.values()):
        each.close()
