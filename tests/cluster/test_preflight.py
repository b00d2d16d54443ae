"""The preflight as a job: a sound allocation, one that is not, and a rank that never connects."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest

from support.checkout import ROOT, TINY, Checkout, until
from support.no_torch import no_torch

CHECK = "python -m jobkit.checks.preflight.cli"


def step(cluster, kit: Checkout, line: str, *words: str, **env: str):
    """srun on two nodes: every rank runs a line of shell, in which "$@" are the words."""
    argv = ["srun", "-K1", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", line, "x", *words]
    own = {**kit.env, "PYTHONPATH": str(ROOT / "src"), **env}
    return cluster.run(*argv, "--", "--dataset", "synthetic", env=own)


def test_a_sound_allocation_is_measured(cluster, kit: Checkout) -> None:
    done = step(cluster, kit, f'exec {CHECK} "$@"', "--json", "--timeout", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout[done.stdout.index("{") :])
    assert said["ok"] and said["exit_code"] == 0 and said["faults"] == []
    places = [(f["rank"], f["local_rank"], f["local_world_size"]) for f in said["ranks"]]
    assert places == [(0, 0, 1), (1, 0, 1)] and len({f["host"] for f in said["ranks"]}) == 2
    measured = {check["check"]: check["measured"] for check in said["checks"]}
    assert "right over 2 ranks" in measured["all_reduce"] and "us" in measured["all_reduce"]
    assert "GB/s between 2 nodes" in measured["bandwidth"]
    assert measured.pop("transports") == "", "only NCCL says which way it takes"
    assert all(measured.values()), measured
    assert not [*(kit.folder / "logs").rglob(".preflight*"), *kit.data.glob(".*")]


def test_run_sh_checks_first_and_trains_nothing_in_an_unsound_allocation(
    cluster, kit: Checkout, tmp_path: Path
) -> None:
    """Another job holds the master's port."""
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    holds = "import pathlib, socket, sys, time\nkept = socket.create_server(('', int(sys.argv[1])))"
    (tmp_path / "holds.py").write_text(f"{holds}\npathlib.Path('held').touch()\ntime.sleep(900)\n")
    words = ["--nodelist=n1", f"--chdir={tmp_path}", "--wrap"]
    holder = cluster.submit(*words, f"{sys.executable} holds.py {port}")
    until((tmp_path / "held").exists, "the port is held")
    words = ["--nodelist=n1,n2", "--nodes=2", "--ntasks-per-node=1", "run.sh", "--preflight", *TINY]
    job_id = kit.sbatch(cluster, *words, MASTER_PORT=port)
    assert cluster.wait(job_id) == ("FAILED", "5:0"), kit.log(job_id)
    cluster.run("scancel", holder)
    (fault,) = [line for line in kit.log(job_id).split("\n") if "FAULT" in line]
    assert f"port {port} cannot be used: Address already in use" in fault and "ss -ltnp" in fault
    assert "nothing was trained" in kit.log(job_id) and "[METRIC]" not in kit.log(job_id)


def test_a_rank_that_never_connects_is_named(cluster, kit: Checkout, tmp_path: Path) -> None:
    """srun ends with 143 then, because it has to end that rank; the line is what counts."""
    light = {"PYTHONPATH": f"{no_torch(tmp_path / 'stand-in')}:{ROOT / 'src'}"}
    line = f'[ $SLURM_PROCID = 1 ] && exec sleep 900; exec {CHECK} "$@"'
    done = step(cluster, kit, line, "--timeout", "20", **light)
    assert done.returncode == 143, done.stdout + done.stderr
    said = r"presence: rank 1 on n\d: did not connect within 20 s; fix: check n\d"
    assert re.search(said, done.stdout)


@pytest.mark.long
@pytest.mark.usefixtures("as_root")
def test_a_link_that_is_absurdly_slow(cluster, kit: Checkout) -> None:
    assert cluster.door("link", "slow", "n2", "20mbit").returncode == 0
    try:
        done = step(cluster, kit, f'exec {CHECK} "$@"', "--timeout", "300")
    finally:
        assert cluster.door("link", "heal").returncode == 0
    assert done.returncode in (5, 143), done.stdout + done.stderr
    assert "busbw 0.00" in done.stdout and "NCCL_SOCKET_IFNAME" in done.stdout
