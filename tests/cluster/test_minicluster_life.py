"""Up, down, crash and all that: what a minicluster adds to a machine, and that it goes again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minicluster.layout import Layout
from support.place import ROOT

WHO = "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


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
            try:
                shown += (process / name).read_bytes() + b"\0"
            except OSError:
                continue
        for link in [process / "cwd", *_entries(process / "fd")]:
            try:
                shown += os.fsencode(link.readlink()) + b"\0"
            except OSError:
                continue
        if re.search(re.escape(text) + rb"[/\0\s]", shown):
            with contextlib.suppress(OSError):  # it has just ended
                found.append(f"process {process.name}: {(process / 'comm').read_text().strip()}")
    found += [
        line for line in Path("/proc/net/unix").read_text().splitlines() if f"{directory}/" in line
    ]
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def shared_traces(directory: Path, base_port: int) -> dict[str, int]:
    """What it takes of things that all clusters of the machine share: how many of each.

    Only its own are counted: other clusters come and go meanwhile. A namespace goes with its
    last process, unless it is mounted somewhere.
    """
    listening = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for words in map(str.split, Path(table).read_text().splitlines()[1:]):
            port = int(words[1].rpartition(":")[2], 16)
            listening += words[3] == "0A" and base_port <= port < base_port + 200
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "listening": listening,
        "links": len(list(Path("/sys/class/net").glob(f"mc{Layout(directory).tag}*"))),
        "mounts": sum(f"{directory}/" in line or " nsfs " in line for line in mounts),
    }


def processes(directory: Path) -> list[int]:
    """The daemons that `up` wrote down."""
    return [
        entry["pid"]
        for entry in json.loads((directory / "minicluster.json").read_text())["processes"]
    ]


@pytest.fixture
def folder(short_dir: Path, door) -> Iterator[Path]:
    """A folder for a cluster that the test itself brings up; taken down whatever happens."""
    made = short_dir / "own"
    yield made
    door("down", directory=made)


@pytest.mark.parametrize("options", [[], pytest.param(["--netns"], marks=needs_root)], ids=str)
def test_down_leaves_nothing(folder: Path, door, options: list[str]) -> None:
    assert door("up", *options, directory=folder).returncode == 0
    base = json.loads((folder / "minicluster.json").read_text())["base_port"]
    conf = {"SLURM_CONF": str(folder / "slurm.conf")}
    orphan = "setsid sh -c 'trap \"\" TERM HUP; exec sleep 999' & sleep 999"
    job = ["sbatch", "-N2", "-o", "/dev/null", "--wrap", f"srun sleep 999 & {orphan}"]
    subprocess.run(job, env=os.environ | conf, check=True, capture_output=True)
    kinds = {"slurmctld", "slurmd", "slurmstepd", "munged", "mariadbd", "slurmdbd", "sleep"}
    _until(lambda: kinds <= {line.rpartition(" ")[2] for line in traces(folder)})
    # slurmctld, slurmdbd, MariaDB; and four slurmd, or four cables and a bridge
    expected = (3, 5) if options else (7, 0)
    assert shared_traces(folder, base) == {
        "listening": expected[0], "links": expected[1], "mounts": 0
    }  # fmt: skip
    assert door("down", directory=folder).returncode == 0
    assert traces(folder) == []
    assert shared_traces(folder, base) == {"listening": 0, "links": 0, "mounts": 0}
    again = door("down", directory=folder)
    assert (again.returncode, again.stdout) == (0, f"no cluster in {folder}\n")


def test_up_after_a_crash(folder: Path, door) -> None:
    assert door("up", "--no-accounting", directory=folder).returncode == 0
    old = processes(folder)
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    _until(lambda: not any(_alive(pid) for pid in old))
    status = door("status", directory=folder)
    assert status.returncode == 1
    assert "slurmctld" in status.stdout and "start from scratch" in status.stdout
    again = door("up", "--no-accounting", directory=folder)
    assert again.returncode == 0, again.stderr
    assert "has crashed" in again.stdout
    assert door("status", directory=folder).returncode == 0
    assert door("down", directory=folder).returncode == 0
    assert traces(folder) == []


@pytest.mark.parametrize("moment", ["starting the accounting", "starting slurmctld"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_up_killed_midway(folder: Path, door, signum: int, moment: str) -> None:
    argv = [sys.executable, "-m", "minicluster", "up", "--dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as running:
        while moment not in running.stdout.readline():
            pass
        time.sleep(0.1)
        running.send_signal(signum)
    if signum == signal.SIGTERM:
        assert running.returncode == 143
        assert traces(folder) == []
        return
    assert len(traces(folder)) > 1
    assert door("down", directory=folder).returncode == 0
    assert traces(folder) == []


OWNER = """
import time

def test_it(make_cluster):
    made = make_cluster("--no-accounting", "--nodes=1")
    made.submit("-o", "/dev/null", "--wrap", "sleep 999")
    with open("folder", "w") as file:
        file.write(str(made.layout.root) + "\\n")
    time.sleep(999)
"""


@pytest.mark.parametrize(
    ("signum", "workers"),
    [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGKILL, ""), (signal.SIGKILL, "-n1")],
    ids=["INT", "TERM", "KILL", "KILL-of-the-workers-owner"],
)
def test_a_cluster_ends_with_the_tests_that_own_it(
    slurm_packages, tmp_path: Path, signum: int, workers: str
) -> None:
    (tmp_path / "test_owner.py").write_text(OWNER)
    parts = [ROOT / "tests" / "cluster", ROOT / "tests", ROOT / "src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, parts))}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", *workers.split()]
    note = tmp_path / "folder"
    with subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as owner:
        _until(lambda: note.exists() and note.read_text().endswith("\n"), 720)
        cluster = Path(note.read_text().strip())
        assert len(traces(cluster)) > 3
        owner.send_signal(signum)
    _until(lambda: not traces(cluster.parent), 720)


def test_a_folder_with_other_files_is_left_alone(short_dir: Path, door) -> None:
    theirs = short_dir / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("years")
    for command in ("up", "down"):
        done = door(command, directory=theirs)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert (theirs / "thesis").read_text() == "years"


@needs_root
@pytest.mark.needs("python3")
def test_an_ordinary_user_without_jobkit_installed(short_dir: Path, slurm_packages) -> None:
    """From a copy that the user may read, with the system's python3: nothing else is needed."""
    home = short_dir / "user"
    shutil.copytree(ROOT / "src/minicluster", home / "src/minicluster")
    (home / "hpc").mkdir()
    shutil.copy(ROOT / "hpc/minicluster", home / "hpc/minicluster")
    shutil.chown(home, 65534)
    path = "/usr/local/bin:/usr/bin:/bin"
    user = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "env",
        "-i",
        f"PATH={path}",
    ]
    script = f"""
    set -e; cd {home}
    hpc/minicluster up --no-accounting --nodes=2 --dir {home}/c
    eval "$(hpc/minicluster env --dir {home}/c)"
    srun -N2 -n2 --gpus-per-task=1 sh -c '{WHO}; id -u'
    hpc/minicluster up --netns --dir {home}/d || echo netns: $?
    hpc/minicluster down --dir {home}/c"""
    done = subprocess.run([*user, "sh", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"n1 0 0", "n2 1 0", "65534", "netns: 2"} <= set(lines)
    assert [line for line in lines if line.startswith("note: only your own jobs run")]
    assert [line for line in lines if line.startswith("note: node names")]
    assert "--netns: network namespaces need root" in done.stderr
    assert traces(home / "c") == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(condition: Callable[[], object], timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
