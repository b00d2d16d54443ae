"""Bring a cluster up and take it down; what the commands of cli.py do."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from minicluster import config, locks, machine, network, ownership, slurm, state
from minicluster.config import Options, Plan
from minicluster.daemons import Starter
from minicluster.errors import ClusterError, Interrupted, UsageError
from minicluster.layout import Layout
from minicluster.processes import find_all, stop, wait_until
from minicluster.state import State

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 1.0  # then KILL: all that they could still write is deleted anyway
_BUSY = "{}: another minicluster command is using this folder; wait for it, then try again"


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    with locks.held(locks.folder_name(layout), _BUSY.format(layout.root)):
        yield


def up(
    layout: Layout, options: Options, port: int | None, say: Callable[[str], None]
) -> tuple[State, str]:
    """Bring the cluster up; returns its state and how: "made", "was up" or "made again"."""
    with locked(layout):
        found = machine.survey(options)
        check_folder(layout)
        current = state.load(layout)
        if current is not None and current.healthy():
            return _same(current, options, layout), "was up"
        crashed = current is not None
        if crashed:
            say("the previous cluster has crashed; removing its remains")
        with interruptible(), locks.port_block(layout, options.nodes, port) as ports:
            take_down(layout)
            try:
                made = _bring_up(layout, options, ports, found, say)
            except BaseException:
                with uninterruptible():
                    take_down(layout)
                raise
        return made, "made again" if crashed else "made"


def _same(current: State, options: Options, layout: Layout) -> State:
    if current.options != options:
        raise ClusterError(
            f"a cluster with other options is up in {layout.root}; "
            "end it first (hpc/minicluster down), or choose another --dir"
        )
    return current


def _bring_up(
    layout: Layout,
    options: Options,
    ports: locks.Ports,
    found: machine.Survey,
    say: Callable[[str], None],
) -> State:
    plan = Plan(
        options=options,
        layout=layout,
        ports=ports,
        host=found.host,
        user=found.user,
        subnet=network.choose_subnet(layout) if options.netns else None,
        names_resolve=found.mounts,
        database_password=secrets.token_hex(16),
    )
    current = State(
        options=options,
        base_port=ports.base,
        subnet=plan.subnet,
        user=found.user,
        names_resolve=found.mounts,
        notes=found.notes,
    )
    write_files(plan, current)
    say(f"folder: {layout.root}")
    Starter(plan, current, say).start_all()
    plan.layout.database_sql.unlink(missing_ok=True)
    current.phase = "up"
    state.save(layout, current)
    return current


def write_files(plan: Plan, current: State) -> None:
    """Make the folder; the state file first, so that a half-made folder is known as ours."""
    at = plan.layout
    os.umask(0o022)
    try:
        at.root.mkdir(exist_ok=True)
        ownership.check(at.root)  # it may have been made by another since it was looked for
        at.root.chmod(0o755)
        state.save(at, current)
    except FileNotFoundError:
        raise UsageError(f"--dir {at.root}: the folder above it does not exist; make it") from None
    except PermissionError:
        raise UsageError(f"--dir {at.root}: you may not write there; choose another") from None
    for folder in (at.run, at.log, at.spool, at.controller_state, at.devices):
        folder.mkdir()
    at.controller_state.chmod(0o700)
    for index in range(plan.options.gpus):
        (at.devices / f"gpu{index}").symlink_to("/dev/null")
    _write_secret(at.munge_key, secrets.token_bytes(1024), 0o400)
    _write_secret(at.slurmdbd_conf, config.slurmdbd_conf(plan).encode(), 0o600)
    _write_secret(at.database_sql, config.database_sql(plan).encode(), 0o600)
    at.slurm_conf.write_text(config.slurm_conf(plan))
    (at.root / "gres.conf").write_text(config.gres_conf(plan))
    (at.root / "cgroup.conf").write_text(config.cgroup_conf(plan))
    at.hosts.write_text(config.hosts(plan, Path("/etc/hosts").read_text()))


def _write_secret(path: Path, content: bytes, mode: int) -> None:
    """Never readable by others, not even for a moment."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def check_folder(layout: Layout) -> None:
    """Refuse a folder that is not ours to fill and to delete."""
    root = layout.root
    if not root.exists():
        return
    if not root.is_dir():
        raise UsageError(f"--dir {root}: not a folder")
    ownership.check(root)
    try:
        # The state file is the first; `up` may have been killed just before it had its name.
        empty = {path.name for path in root.iterdir()} <= {layout.state_file_beside.name}
    except PermissionError:
        raise UsageError(f"--dir {root}: you may not read it; choose another") from None
    if not empty and not layout.state_file.exists():
        raise UsageError(
            f"--dir {root}: holds other files, and `down` deletes the folder; choose a new one"
        )


def down(layout: Layout) -> bool:
    """Take the cluster down; False when there was nothing."""
    with locked(layout), uninterruptible():
        check_folder(layout)
        there = layout.root.exists() or bool(find_all(layout))
        take_down(layout)
        return there


def take_down(layout: Layout) -> None:
    """End every process of the cluster, and remove all that it made; idempotent."""
    current = state.load(layout)
    recorded = [p for p in current.processes if current.alive(p)] if current else []
    if current and current.healthy():
        _cancel_jobs(layout)
    stop([p for p in recorded if p.name.startswith("slurm")], _GRACE_S)
    stop(find_all(layout), _GRACE_S)  # jobs, slurmstepd, and what was not written down
    stop(recorded, _GRACE_S)  # another program may have hidden its environment from us
    network.remove(layout)
    _delete(layout)


def _delete(layout: Layout) -> None:
    """Delete the folder; the state file last, so that half of it is still known as ours."""
    if not layout.root.exists():
        return
    for path in layout.root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != layout.state_file:
            path.unlink()
    shutil.rmtree(layout.root)


def _cancel_jobs(layout: Layout) -> None:
    """End the jobs by Slurm first: an `srun` in another terminal then ends as well."""
    if slurm.ask(layout, "squeue", "--noheader", timeout_s=2.0):
        for partition in ("batch", "urgent"):
            slurm.ask(layout, "scancel", f"--partition={partition}", timeout_s=2.0)
        wait_until(lambda: not slurm.ask(layout, "squeue", "--noheader", timeout_s=2.0), 2.0, 0.1)


def running(layout: Layout, reading: bool = False) -> State:
    """The state of the cluster that is up, or ClusterError.

    reading: root's cluster is fine too. Raises UsageError where somebody else may write what is
    about to be believed and executed.
    """
    if layout.root.exists():
        ownership.check(layout.root, reading)
        for path in (layout.state_file, layout.slurm_conf):
            if path.is_symlink() or path.exists():
                ownership.check_entry(path, reading)
    current = state.load(layout)
    if current is None or current.phase != "up":
        raise ClusterError(f"no cluster is up in {layout.root}; start one: hpc/minicluster up")
    return current


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn a signal into Interrupted, so that what was begun is undone."""

    def stop_now(signum: int, _frame: FrameType | None) -> None:
        raise Interrupted(signum)

    with _handlers(stop_now):
        yield


@contextmanager
def uninterruptible() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave half of it behind."""
    with _handlers(signal.SIG_IGN):
        yield


@contextmanager
def _handlers(handler: signal._HANDLER) -> Iterator[None]:
    before = {signum: signal.signal(signum, handler) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
