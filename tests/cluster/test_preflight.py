"""The preflight as a job: a sound allocation, and one that is not."""

import re
import socket
import sys

from support.checkout import ROOT, TINY, Checkout
from support.place import until


def test_a_sound_allocation_is_measured(cluster, kit: Checkout) -> None:
    check = ["python", "-m", "jobkit.checks.preflight.cli", "--timeout", "300"]
    words = ["srun", "-K1", "--nodes=2", "--ntasks-per-node=1", *check, "--dataset", "synthetic"]
    done = cluster.run(*words, env={**kit.env, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "all checks passed" in said and "FAULT" not in said
    ranks = r"ok ranks: world size 2, each rank once; rank 0 on n\d, rank 1 on n\d\n"
    assert re.search(ranks, said), said
    assert re.search(r"all_reduce: right over 2 ranks with gloo; latency \d+ us", said)
    assert "GB/s between 2 nodes" in said
    assert not [*(kit.folder / "logs").rglob(".preflight*"), *kit.data.glob(".*")]


def test_run_sh_trains_nothing_in_an_unsound_allocation(cluster, kit, tmp_path) -> None:
    """Another job holds the master's port."""
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    holds = "import pathlib, socket, sys, time\nkept = socket.create_server(('', int(sys.argv[1])))"
    (tmp_path / "holds.py").write_text(f"{holds}\npathlib.Path('held').touch()\ntime.sleep(900)\n")
    words = ["--nodelist=n1", f"--chdir={tmp_path}", "--wrap"]
    holder = cluster.submit(*words, f"{sys.executable} holds.py {port}")
    until((tmp_path / "held").exists, "the port is held")
    words = ["--nodelist=n1,n2", "--nodes=2", "--ntasks-per-node=1", "run.sh", "--preflight"]
    words += ["--device", "cpu", *TINY]  # the nodes' GPUs are Slurm's alone
    job_id = kit.sbatch(cluster, *words, MASTER_PORT=port)
    assert cluster.wait(job_id) == ("FAILED", "5:0"), kit.log(job_id)
    cluster.run("scancel", holder)
    (fault,) = [line for line in kit.log(job_id).split("\n") if "FAULT" in line]
    assert f"port {port} cannot be used: Address already in use" in fault and "ss -ltnp" in fault
    assert "nothing was trained" in kit.log(job_id) and "[METRIC]" not in kit.log(job_id)
    assert kit.statuses(cluster, "single")[f"job-{job_id}"] == "failed"
