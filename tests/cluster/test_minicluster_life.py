"""Up, down and crashes: what a minicluster adds to a machine, and that it goes again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minicluster.config import tag
from minicluster.machine import DIR_VARIABLE
from minicluster.processes import members
from support.place import ROOT, until


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
