"""Up, down and crashes: what a minicluster adds to a machine, and that it goes again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minicluster.layout import Layout
from support.place import ROOT, until


def traces(directory: Path) -> list[str]:
    """Everything on this machine that has to do with a cluster in this folder.

    Its own search, not the product's: by all that a process may show of itself, by mounts,
    sockets and network links.
    """
    text = os.fsencode(directory)
    found = [str(directory)] if directory.exists() else []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        shown = b""
        for name in ("cmdline", "environ", "mountinfo"):
            with contextlib.suppress(OSError):
                shown += (process / name).read_bytes() + b"\0"
        with contextlib.suppress(OSError):
            for link in [process / "cwd", *(process / "fd").iterdir()]:
                with contextlib.suppress(OSError):
                    shown += os.fsencode(link.readlink()) + b"\0"
        if re.search(re.escape(text) + rb"[/\0\s]", shown):
            with contextlib.suppress(OSError):  # it has just ended
                found.append(f"process {process.name}: {(process / 'comm').read_text().strip()}")
    sockets = Path("/proc/net/unix").read_text().splitlines()
    links = Path("/sys/class/net").glob(f"mc{Layout(directory).tag}*")
    return found + [line for line in sockets if f"{directory}/" in line] + [p.name for p in links]


@pytest.fixture
def folder(short_dir: Path, door) -> Iterator[Path]:
    made = short_dir / "own"
    yield made
    door("down", directory=made)


def test_down_leaves_nothing(folder: Path, door) -> None:
    """Of a cluster with all its daemons, with a job whose orphan ignores signals."""
    options = ["--netns"] if os.geteuid() == 0 else []
    assert door("up", "--nodes=2", *options, directory=folder).returncode == 0
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
    for process in json.loads((folder / "minicluster.json").read_text())["processes"]:
        os.kill(process["pid"], signal.SIGKILL)
    until(lambda: door("status", directory=folder).returncode == 1, "the crash is seen")
    status = door("status", directory=folder).stdout
    assert "slurmctld" in status and "start from scratch" in status
    again = door(*up, directory=folder)
    assert again.returncode == 0 and "has crashed" in again.stdout, again.stderr
    assert door("status", directory=folder).returncode == 0
    assert door("down", directory=folder).returncode == 0
    assert traces(folder) == []


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_up_killed_midway(folder: Path, door, signum: int) -> None:
    words = ["up", "--nodes=1", "--no-accounting", "--dir", str(folder)]
    argv = [sys.executable, "-m", "minicluster", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as running:
        while "starting slurmctld" not in running.stdout.readline():
            pass
        running.send_signal(signum)
    if signum == signal.SIGKILL:
        assert len(traces(folder)) > 1
        assert door("down", directory=folder).returncode == 0
    assert traces(folder) == []


OWNER = """
import time

def test_it(make_cluster):
    made = make_cluster("--no-accounting", "--nodes=1")
    made.submit("--wrap", "sleep 999")
    with open("folder", "w") as file:
        file.write(str(made.layout.root) + "\\n")
    time.sleep(999)
"""


@pytest.mark.parametrize("workers", ["", pytest.param("-n1", marks=pytest.mark.long)])
def test_a_cluster_ends_with_the_tests_that_own_it(slurm_packages, tmp_path, workers) -> None:
    """Also where they end by KILL."""
    (tmp_path / "test_owner.py").write_text(OWNER)
    parts = [ROOT / "tests" / "cluster", ROOT / "tests", ROOT / "src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, parts))}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", *workers.split()]
    note = tmp_path / "folder"
    with subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as owner:
        until(lambda: note.exists() and note.read_text().endswith("\n"), "its cluster")
        cluster = Path(note.read_text().strip())
        assert len(traces(cluster)) > 3
        owner.kill()
    until(lambda: not traces(cluster.parent), "nothing is left")


def test_a_folder_with_other_files_is_left_alone(short_dir: Path, door) -> None:
    theirs = short_dir / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("years")
    for command in ("up", "down"):
        done = door(command, directory=theirs)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert (theirs / "thesis").read_text() == "years"
