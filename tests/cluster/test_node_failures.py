"""A run survives the end of a node's slurmd, of a node, and a node that does not answer (long)."""

from pathlib import Path

import pytest

from jobkit.outcome.state import run_state
from support.checkout import TINY, Checkout
from support.place import until
from support.records import records_of

LONG = [*TINY, "--epochs", "12", "--checkpoint-every", "4"]


@pytest.mark.long
@pytest.mark.parametrize("what", ["slurmd", "node", "link"])
def test_a_run_survives(cluster, kit: Checkout, what: str, request) -> None:
    """It waits in iteration 9; then goes on from its checkpoint, on the nodes that are left."""
    if what == "link":
        request.getfixturevalue("as_root")
    size = "2" if what == "slurmd" else "2x1"  # without its slurmd a node goes on computing
    words = ["--study", "demo", "--strategies", "ddp", "--gpus", size, *LONG]
    words += ["--timeout-s", "60"] if what == "link" else []  # of a collective that is not joined
    (job_id,) = kit.start(cluster, what, *words, JOBKIT_FAULT="hold@9:0")
    (paths,) = kit.runs(what)
    until(paths.fault_marker(0).exists, "iteration 9")
    hosts = cluster.show(job_id)[0]["NodeList"]
    node = cluster.run("scontrol", "show", "hostnames", hosts).stdout.split()[-1]
    if what == "link":
        cluster.link(node, "down")
    else:
        assert cluster.kill(node, jobs=what == "node")
    try:
        if what == "slurmd":
            until(lambda: len(paths.attempt_numbers()) == 2, "the next attempt")
        Path(paths.fault_marker(0)).unlink()
        cluster.wait(job_id)
    finally:
        if what == "link":
            cluster.link(node, "up")
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
        else:
            cluster.start(node)
    if run_state(paths).status != "ok":  # its ranks failed before Slurm missed the node
        again = kit.bench(cluster, "--name", what, *words)
        assert again.returncode == 0, again.stdout
    assert run_state(paths).status == "ok" and len(paths.attempt_numbers()) == 2
    (loaded,) = records_of(paths.metrics(1), "checkpoint")[:1]
    assert loaded["action"] == "loaded" and loaded["iteration"] >= 8
    if what == "slurmd":  # the attempt lived on, and wrote no more once another had begun
        assert "attempt 0 is fenced" in paths.outcome(0).read_text()
        assert not list(paths.checkpoints.glob("*-0"))
