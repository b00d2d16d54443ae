"""Bring a cluster up and take it down; what the commands of cli.py do."""

import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jobkit import files
from jobkit.errors import NotStarted, UsageError
from jobkit.permissions import check_study
from minicluster import config, machine
from minicluster.config import STATE_FILE, Cluster
from minicluster.daemons import Starter, daemon_names
from minicluster.processes import dead, end, members

_GRACE_S = 1.0  # then KILL: all that they could still write is deleted anyway


def folder_of() -> Path:
    """The folder of this user's cluster: the one that `env` named, else one under /tmp.

    That is on a local disk, and open to other users of root's cluster. Raises UsageError for a
    path that Slurm's files cannot hold, or its sockets, whose paths have at most 107 bytes.
    """
    usual = f"/tmp/jobkit-minicluster-{os.getuid()}"
    root = Path(os.environ.get(machine.DIR_VARIABLE) or usual).resolve()
    if not re.fullmatch("[A-Za-z0-9_.+/-]{2,69}", str(root)):
        raise UsageError(f"{root}: choose a short path of letters, digits and _ . + - as /tmp/mc")
    return root


def check_folder(root: Path, reading: bool = False) -> None:
    """Raise UsageError where a folder is not this user's alone, or not ours to fill and to delete.

    What lies in it is executed, by root where root made it. reading: root's will do as well.
    """
    if not root.exists():
        return
    if not root.is_dir():
        raise UsageError(f"{root}: not a folder")
    check_study(root)
    owner, mine = root.stat().st_uid, os.geteuid()
    if owner != mine and not (reading and owner == 0):
        raise UsageError(f"{root} belongs to user id {owner}; choose another, or be them")
    # The state file is the first; `up` may have been killed just before it had its name.
    strange = [name for name in files.file_names(root) if not name.startswith(f".{STATE_FILE}.")]
    if strange and STATE_FILE not in strange:
        raise UsageError(f"{root}: holds other files, and `down` deletes it; choose a new one")


def up(cluster: Cluster, say: Callable[[str], None]) -> Cluster:
    """Bring a cluster up, where it is not; return it. Raises UsageError."""
    root = cluster.root
    machine.check()
    check_folder(root)
    current = Cluster.load(root)
    if current:
        if not dead(root, daemon_names(current)):
            raise NotStarted(f"a cluster is up in {root}; end it first: hpc/minicluster down")
        say("the previous cluster has crashed; removing its remains")
    with on_signals(_interrupt):
        take_down(root)
        try:
            with machine.free_ports(cluster):
                if machine.may_have_network(cluster):
                    cluster.subnet = machine.choose_subnet(root)
                # Ten ids a second: none is one of an earlier cluster, in 69 days.
                cluster.first_job = int(time.time()) * 10 % 60_000_000 + 1
                write_files(cluster)
                say(f"folder: {root}")
                Starter(cluster).start_all(say)
            (root / "db-init.sql").unlink()
        except BaseException:
            with on_signals(signal.SIG_IGN):  # a second Ctrl-C must not leave half behind
                take_down(root)
            raise
    return cluster


@contextmanager
def temporary(purpose: str, **options: Any) -> Iterator[Cluster]:
    """A cluster in a folder of its own, at which the Slurm commands of this process point."""
    root = Path(tempfile.mkdtemp(prefix=f"jobkit-{purpose}-", dir="/tmp"))
    try:
        cluster = up(Cluster(root=root, **options), lambda text: None)
        os.environ.update(machine.exports(root))
        yield cluster
    finally:
        down(root)


def write_files(cluster: Cluster) -> None:
    """Make the folder; the state file first, so that a half-made folder is known as ours."""
    root = cluster.root
    try:
        root.mkdir()
    except OSError as error:
        raise UsageError(f"{root}: it cannot be made there: {error.strerror}") from None
    root.chmod(0o755)  # for other users' jobs
    cluster.save()
    for name in ("run", "log", "spool", "dev", "state"):
        (root / name).mkdir(mode=0o700 if name == "state" else 0o755)
    for index in range(cluster.gpus):
        (root / "dev" / f"gpu{index}").symlink_to("/dev/null")
    password = secrets.token_hex(16)
    closed = {
        "munge.key": secrets.token_hex(512),
        "slurmdbd.conf": config.slurmdbd_conf(cluster, password),
        "db-init.sql": config.database_sql(password),
    }
    texts = closed | {
        "slurm.conf": config.slurm_conf(cluster),
        "gres.conf": config.gres_conf(cluster),
        "cgroup.conf": config.cgroup_conf(cluster),
        "hosts": config.hosts(cluster, Path("/etc/hosts").read_text()),
    }
    for name, text in texts.items():  # a secret is never readable by others, not for a moment
        mode = 0o600 if name in closed else 0o644
        handle = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "w") as file:
            file.write(text)


def down(root: Path) -> bool:
    """Take the cluster down; False when there was nothing."""
    with on_signals(signal.SIG_IGN):
        check_folder(root)
        there = root.exists() or bool(members(root))
        take_down(root)
        return there


def take_down(root: Path) -> None:
    """End every process of the cluster, and remove all that it made; idempotent."""
    cluster = Cluster.load(root)
    if cluster and not dead(root, daemon_names(cluster)):
        # The jobs by Slurm first: an `srun` in another terminal then ends as well.
        for partition in ("batch", "urgent"):
            machine.ask(root, "scancel", f"--partition={partition}", timeout_s=2.0)
        deadline = time.monotonic() + 2
        while machine.ask(root, "squeue", "-h", timeout_s=2.0) and time.monotonic() < deadline:
            time.sleep(0.1)
    end(root, _GRACE_S)
    machine.remove_network(root)
    if root.exists():
        for path in root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != STATE_FILE:  # the last: half a folder is still known as ours
                path.unlink()
        shutil.rmtree(root)


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    """So that what was begun is undone."""
    raise KeyboardInterrupt(signum)


@contextmanager
def on_signals(handler: "signal._HANDLER") -> Iterator[None]:
    """Handle the signals that end a command so, for a while."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
