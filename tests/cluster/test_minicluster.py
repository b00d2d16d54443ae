"""The minicluster as its users see it: a real Slurm that does what it promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from minicluster import machine

WHO = "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def second(make_cluster):
    """A second cluster, beside the session's; it has what the first has not."""
    return make_cluster("--no-accounting", "--preemption", "--nodes=2", "--cores=2", "--gpus=2")


def test_all_nodes_are_idle(cluster) -> None:
    idle = [f"n{i} idle 8 gpu:4" for i in range(1, 5)] + [""]
    words = ("sinfo", "--noheader", "--Node", "--format=%N %T %c %G")
    _until(lambda: cluster.run(*words).stdout.split("\n") == idle)  # an earlier job may be ending
    assert re.search(r"^up: n\[1-4\] idle, .*; \d+\.\d s$", cluster.printed, re.MULTILINE)


def test_two_nodes_of_two_tasks(cluster) -> None:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "sh", "-c", WHO)
    assert sorted(done.stdout.splitlines()) == ["n1 0 0", "n1 1 1", "n2 2 0", "n2 3 1"], done.stderr


def test_gpus_of_two_jobs_on_a_node_differ(cluster, tmp_path: Path) -> None:
    meet = "until [ $(ls | wc -l) -ge 2 ]; do sleep 0.1; done"  # both run at the same time
    words = ["-w", "n3", "--gpus-per-node=2", f"--output={tmp_path}/%j"]
    script = f"cd {tmp_path}; echo $CUDA_VISIBLE_DEVICES; {meet}"
    jobs = [cluster.submit(*words, "--wrap", script) for _ in range(2)]
    assert [cluster.wait(job) for job in jobs] == [("COMPLETED", "0:0")] * 2
    assert sorted((tmp_path / job).read_text() for job in jobs) == ["0,1\n", "2,3\n"]


def test_exit_code_and_signal_of_a_job(cluster) -> None:
    assert cluster.wait(cluster.submit("-o", "/dev/null", "--wrap", "exit 7")) == ("FAILED", "7:0")


def with_scontrol(cluster, folder: Path, text: str):
    """The cluster, with a script in place of scontrol; in it `real` runs the right one."""
    real = shutil.which("scontrol", path=machine.search_path())
    (folder / "scontrol").write_text(f'#!/bin/sh\nreal() {{ {real} "$@"; }}\n{text}\n')
    (folder / "scontrol").chmod(0o755)
    return replace(cluster, env=cluster.env | {"PATH": f"{folder}:{cluster.env['PATH']}"})


def test_a_job_that_slurm_has_forgotten_has_ended_as_the_accounting_says(
    cluster, tmp_path: Path
) -> None:
    forgot = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    forgetful = with_scontrol(cluster, tmp_path, forgot)
    job = cluster.submit("-o", "/dev/null", "--wrap", "exit 7")
    assert forgetful.wait(job, 300) == ("FAILED", "7:0")


def test_slurm_is_asked_again_where_it_did_not_answer(cluster, tmp_path: Path) -> None:
    mute = f'cd {tmp_path}; [ -e asked ] && real "$@" && exit; touch asked; exit 1'
    job = cluster.submit("-o", "/dev/null", "--wrap", "true")
    assert with_scontrol(cluster, tmp_path, mute).wait_for(job, 60)["JobId"] == job


def test_accounting_row(cluster) -> None:
    job = cluster.submit("-N2", "--gpus-per-node=1", "-o", "/dev/null", "--wrap", "srun true")
    cluster.wait(job)
    deadline = time.monotonic() + 100
    row = ""
    while not row.startswith("COMPLETED") and time.monotonic() < deadline:
        columns = "--format=State,ExitCode,NNodes,AllocTRES%80"
        row = cluster.run("sacct", "-nPX", "-j", job, columns).stdout
        time.sleep(0.2)
    assert row.startswith("COMPLETED|0:0|2|")
    assert "gres/gpu=2" in row


def test_steps_get_ports_of_their_own(cluster, tmp_path: Path) -> None:
    meet = f"cd {tmp_path}; touch $$; until [ $(ls | wc -l) -ge 2 ]; do sleep 0.1; done"
    ask = ["srun", "-n1", "--resv-ports=2", "sh", "-c", f"echo $SLURM_STEP_RESV_PORTS; {meet}"]
    running = [
        subprocess.Popen(ask, env=cluster.env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    first, second = (process.communicate(timeout=300)[0].strip() for process in running)
    assert first and second and first != second


def test_a_job_for_more_nodes_than_there_are_is_refused(cluster) -> None:
    done = cluster.run("sbatch", "-N9", "--wrap", "true")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_task_that_ignores_the_signal_ends_with_its_job(cluster, tmp_path: Path) -> None:
    script = tmp_path / "stubborn"
    script.write_text(
        f"#!/bin/sh\nsh -c 'trap \"\" TERM; echo $$ >{tmp_path}/pid; sleep 999' &\nwait\n"
    )
    job = cluster.submit("-o", "/dev/null", str(script))
    _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    cluster.run("scancel", job)
    _until(lambda: not _alive(int((tmp_path / "pid").read_text())))


@needs_root
def test_node_names_resolve_in_jobs_and_nowhere_else(cluster) -> None:
    done = cluster.run("srun", "-N1", "getent", "hosts", "n4")
    assert done.stdout.split() == ["127.0.0.1", "n4"]
    assert cluster.run("getent", "hosts", "n4").returncode == 2


@needs_root
def test_another_user_may_use_a_roots_cluster(cluster) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = cluster.run(*nobody, "srun", "-N2", "id", "-u", cwd=Path("/"))
    assert done.stdout.split() == ["65534", "65534"], done.stderr


def test_two_clusters_at_the_same_time(cluster, second, tmp_path: Path) -> None:
    first_bases, second_bases = (
        re.search(r"ports from (\d+)", one.printed)[1] for one in (cluster, second)
    )
    assert first_bases != second_bases
    jobs = [(one, one.submit("-o", f"{tmp_path}/%x-{n}", "--job-name=x", "--wrap",
                             "scontrol show config | grep SLURM_CONF; sleep 1"))
            for n, one in enumerate((cluster, second))]  # fmt: skip
    for n, (one, job) in enumerate(jobs):
        assert one.wait(job) == ("COMPLETED", "0:0")
        assert str(one.layout.slurm_conf) in (tmp_path / f"x-{n}").read_text()
    shown = second.run("sinfo", "-h", "-o", "%P,%D").stdout.split()
    assert shown == ["batch*,2", "urgent,2"]


def test_preemption_requeues(second, tmp_path: Path) -> None:
    script = (
        f'echo run $SLURM_RESTART_COUNT >>{tmp_path}/log; [ -n "$SLURM_RESTART_COUNT" ] || sleep 99'
    )
    low = second.submit("-N2", "--exclusive", "-o", "/dev/null", "--wrap", script)
    _until(lambda: (tmp_path / "log").exists())
    urgent = second.submit("-p", "urgent", "-N2", "-o", "/dev/null", "--wrap", "true")
    assert second.wait(urgent) == ("COMPLETED", "0:0")
    assert second.wait(low, 720) == ("COMPLETED", "0:0")
    assert second.show(low)[0]["Restarts"] == "1"
    assert (tmp_path / "log").read_text().splitlines() == ["run", "run 1"]


def test_a_second_up_changes_nothing(second, door) -> None:
    directory = second.layout.root
    before = processes(directory)
    same = ["--no-accounting", "--preemption", "--nodes=2", "--cores=2", "--gpus=2"]
    assert "was up already" in door("up", *same, directory=directory).stdout
    other = door("up", directory=directory)
    assert other.returncode == 1 and "other options" in other.stderr
    assert processes(directory) == before


def test_env_points_a_shell_at_it(second, door) -> None:
    lines = door("env", directory=second.layout.root).stdout
    argv = ["sh", "-c", f'eval "{lines}"; sinfo -h -N -o %N']
    bare = {"PATH": os.environ["PATH"]}
    done = subprocess.run(argv, capture_output=True, text=True, env=bare)
    assert set(done.stdout.split()) == {"n1", "n2"}


def test_env_of_no_cluster_is_one_line_and_nothing_for_eval(short_dir: Path, door) -> None:
    done = door("env", directory=short_dir / "none")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "hpc/minicluster up" in done.stderr


def test_link_without_netns(second, door) -> None:
    done = door("link", "cut", "n1", directory=second.layout.root)
    assert done.returncode == 2 and "--netns" in done.stderr


def test_a_job_over_its_memory_is_killed(make_cluster) -> None:
    cluster = make_cluster("--memory-limits", "--no-accounting", "--nodes=1")
    eat = f"exec {sys.executable} -c 'import time; x = bytearray(300 << 20); time.sleep(20)'"
    job = cluster.submit("--mem=100M", "-o", "/dev/null", "--wrap", eat)
    small = cluster.submit("--mem=900M", "-o", "/dev/null", "--wrap", eat.replace("(20)", "(1)"))
    assert cluster.wait(job).state == "FAILED"
    assert cluster.wait(small) == ("COMPLETED", "0:0")
    assert "ends FAILED, not OUT_OF_MEMORY" in cluster.printed
    assert cluster.door("down").returncode == 0


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(condition: Callable[[], object], timeout: float = 720) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def processes(directory: Path) -> list[int]:
    """The daemons that `up` wrote down."""
    return [
        entry["pid"]
        for entry in json.loads((directory / "minicluster.json").read_text())["processes"]
    ]
