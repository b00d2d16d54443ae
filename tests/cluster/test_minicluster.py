"""The minicluster: a real Slurm that does what it promises, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobkit.processes import process_start
from minicluster.config import Cluster, tag
from minicluster.daemons import daemon_names
from minicluster.machine import DIR_VARIABLE
from minicluster.processes import dead, members
from support.place import ROOT, until

WHO = "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"
needs_root = pytest.mark.usefixtures("as_root")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def test_all_nodes_are_idle_and_a_second_up_changes_nothing(cluster, door) -> None:
    root = cluster.root
    before = (root / "minicluster.json").read_text()
    idle = [f"n{i} idle 64 gpu:4" for i in range(1, 5)]
    words = ("sinfo", "--noheader", "--Node", "--partition=urgent", "--format=%N %T %c %G")
    until(lambda: cluster.run(*words).stdout.splitlines() == idle, "all nodes are idle")
    assert re.search(r"^up: n\[1-4\] idle, .*; \d+\.\d s$", cluster.printed, re.MULTILINE)
    again = door("up", directory=root)
    assert again.returncode == 1 and "a cluster is up in" in again.stderr
    assert (root / "minicluster.json").read_text() == before


def test_tasks_have_nodes_ranks_and_gpus(cluster) -> None:
    done = cluster.run("srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "sh", "-c", WHO)
    places = sorted((line.split() for line in done.stdout.splitlines()), key=lambda p: p[1])
    assert [place[1:] for place in places] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    first, second = ({node for node, *_ in half} for half in (places[:2], places[2:]))
    assert len(first) == len(second) == 1 and first != second, done.stderr


@needs_root
def test_node_names_resolve_in_jobs_and_nowhere_else(cluster) -> None:
    done = cluster.run("srun", "-w", "n1", "sh", "-c", "hostname; getent hosts n4")
    assert re.fullmatch(r"n1\n10\.77\.\d+\.4 +n4\n", done.stdout), done
    assert cluster.run("getent", "hosts", "n4").returncode == 2


def test_a_killed_node_takes_its_jobs_along_and_comes_back(cluster, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    job = cluster.submit("-w", "n4", "--wrap", f"trap '' TERM; echo $$ > {pid}; sleep 99 & wait")
    until(lambda: pid.exists() and pid.read_text(), "its start")
    assert cluster.kill("n4", jobs=True) > 1
    assert process_start(int(pid.read_text())) is None
    assert dead(cluster.root, daemon_names(Cluster.load(cluster.root))) == ["slurmd.n4"]
    cluster.run("scancel", job)
    cluster.start("n4")
    assert cluster.run("srun", "-w", "n4", "hostname").returncode == 0


@pytest.mark.long
@needs_root
@pytest.mark.needs("python3")
def test_an_ordinary_user_without_jobkit_installed(short_dir: Path, slurm_packages) -> None:
    """From a copy that the user may read, with the system's python3: nothing else is needed."""
    home = short_dir / "user"
    shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("*.pyc"))
    (home / "hpc").mkdir()
    shutil.copy(ROOT / "hpc/minicluster", home / "hpc/minicluster")
    shutil.chown(home, 65534)
    script = f"""
    set -e; cd {home}
    export JOBKIT_MINICLUSTER_DIR={home}/c
    hpc/minicluster up --no-accounting --nodes=2
    eval "$(hpc/minicluster env)"
    srun -N2 -n2 --gpus-per-task=1 sh -c '{WHO}; id -u'
    hpc/minicluster down"""
    user = [*NOBODY, "env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "sh", "-c", script]
    done = subprocess.run(user, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"n1 0 0", "n2 1 0", "65534"} <= set(lines)
    assert not (home / "c").exists()


def traces(directory: Path) -> list[str]:
    """Everything on this machine that has to do with a cluster in this folder.

    Its own search, not the product's: by words, environment and mounts of processes, by sockets
    and network links.
    """
    named = re.compile(re.escape(os.fsencode(directory)) + rb"[/\0\s]")
    found = [str(directory)] if directory.exists() else []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            files = [process / name for name in ("cmdline", "environ", "mountinfo")]
            shown = b"\0".join(file.read_bytes() for file in files)
            if named.search(shown) and int(process.name) != os.getpid():
                found.append(f"process {process.name}: {(process / 'comm').read_text().strip()}")
    sockets = Path("/proc/net/unix").read_text().splitlines()
    links = Path("/sys/class/net").glob(f"mc{tag(directory)}*")
    return found + [line for line in sockets if f"{directory}/" in line] + [p.name for p in links]


@pytest.fixture
def folder(short_dir: Path, door) -> Iterator[Path]:
    made = short_dir / "own"
    yield made
    door("down", directory=made)


def test_down_leaves_nothing(folder: Path, door) -> None:
    """Of a cluster with all its daemons, with a job whose orphan ignores signals."""
    assert door("up", "--nodes=2", directory=folder).returncode == 0
    orphan = "setsid sh -c 'trap \"\" TERM HUP; exec sleep 999' & sleep 999"
    job = ["sbatch", "-N2", "-o", "/dev/null", "--wrap", f"srun sleep 999 & {orphan}"]
    conf = {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(job, env=os.environ | conf, check=True, capture_output=True)
    kinds = {"slurmctld", "slurmd", "slurmstepd", "munged", "mariadbd", "slurmdbd", "sleep"}
    until(lambda: kinds <= {line.rpartition(" ")[2] for line in traces(folder)}, "its processes")
    assert door("down", directory=folder).returncode == 0
    assert traces(folder) == []
    assert f"{folder}/" not in Path("/proc/self/mountinfo").read_text()
    again = door("down", directory=folder)
    assert (again.returncode, again.stdout) == (0, f"no cluster in {folder}\n")


def test_up_after_a_crash(folder: Path, door) -> None:
    up = ("up", "--no-accounting", "--nodes=1")
    assert door(*up, directory=folder).returncode == 0
    for trace in traces(folder):
        if process := re.match(r"process (\d+)", trace):
            os.kill(int(process[1]), signal.SIGKILL)
    until(lambda: not members(folder), "its end")
    again = door(*up, directory=folder)
    assert again.returncode == 0 and "has crashed" in again.stdout, again.stderr
    assert door("down", directory=folder).returncode == 0
    assert traces(folder) == []


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_up_killed_midway(folder: Path, door, signum: int) -> None:
    argv = [sys.executable, str(ROOT / "hpc" / "minicluster"), "up", "--nodes=1", "--no-accounting"]
    env = os.environ | {DIR_VARIABLE: str(folder)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as running:
        while "starting slurmctld" not in running.stdout.readline():
            pass
        running.send_signal(signum)
    if signum == signal.SIGKILL:
        assert len(traces(folder)) > 1
        assert door("down", directory=folder).returncode == 0
    else:
        assert running.returncode == 128 + signum
    assert traces(folder) == []
