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

from minicluster import config, machine, network, state
from minicluster.config import Options, Plan
from minicluster.daemons import SLURMCTLD, Starter, slurmd_of
from minicluster.layout import ClusterError, Layout, Ports, UsageError, check_owner
from minicluster.locks import locked, port_block
from minicluster.processes import find_all, find_on_node, send, stop, wait_until
from minicluster.state import State

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 1.0  # then KILL: all that they could still write is deleted anyway


class Interrupted(BaseException):
    """A signal arrived while the cluster was being brought up."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def up(
    layout: Layout, options: Options, port: int | None, say: Callable[[str], None]
) -> tuple[State, str]:
    """Bring the cluster up; returns its state and how: "made", "was up" or "made again"."""
    with locked(layout):
        survey = machine.survey(options)
        check_folder(layout)
        current = state.load(layout)
        if current is not None and current.healthy():
            if current.options != options:
                raise ClusterError(
                    f"a cluster with other options is up in {layout.root}; "
                    "end it first (hpc/minicluster down), or choose another --dir"
                )
            return current, "was up"
        crashed = current is not None
        if crashed:
            say("the previous cluster has crashed; removing its remains")
        with _on_signals(_interrupt), port_block(layout, options.nodes, port) as ports:
            take_down(layout)
            try:
                new = _bring_up(layout, options, ports, survey, say)
            except BaseException:
                with _on_signals(signal.SIG_IGN):  # a second Ctrl-C must not leave half behind
                    take_down(layout)
                raise
        return new, "made again" if crashed else "made"


def _bring_up(
    layout: Layout,
    options: Options,
    ports: Ports,
    survey: machine.Survey,
    say: Callable[[str], None],
) -> State:
    current = State(
        options=options,
        base_port=ports.base,
        subnet=network.choose_subnet(layout) if options.netns else None,
        user=survey.user,
        names_resolve=survey.mounts,
        notes=survey.notes,
    )
    plan = plan_of(layout, current, secrets.token_hex(16))
    write_files(plan, current)
    say(f"folder: {layout.root}")
    Starter(plan, current, say).start_all()
    layout.database_sql.unlink(missing_ok=True)
    current.phase = "up"
    state.save(layout, current)
    return current


def plan_of(layout: Layout, current: State, database_password: str = "") -> Plan:
    """The plan of a cluster from its state, which never holds the database's password."""
    return Plan(
        options=current.options,
        layout=layout,
        ports=Ports(current.base_port),
        host=machine.short_host(),
        user=current.user,
        subnet=current.subnet,
        names_resolve=current.names_resolve,
        database_password=database_password,
    )


def write_files(plan: Plan, current: State) -> None:
    """Make the folder; the state file first, so that a half-made folder is known as ours."""
    at = plan.layout
    os.umask(0o022)
    try:
        at.root.mkdir(exist_ok=True)
        check_owner(at.root)  # it may have been made by another since it was looked for
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
    check_owner(root)
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
    with locked(layout), _on_signals(signal.SIG_IGN):
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
    if machine.ask(layout, "squeue", "--noheader", timeout_s=2.0):
        for partition in ("batch", "urgent"):
            machine.ask(layout, "scancel", f"--partition={partition}", timeout_s=2.0)
        wait_until(lambda: not machine.ask(layout, "squeue", "--noheader", timeout_s=2.0), 2.0, 0.1)


def kill(layout: Layout, name: str, jobs: bool) -> str:
    """SIGKILL a node's slurmd, or slurmctld; return what was done, in one line.

    jobs: all processes on the node too, as after a power loss. Raises UsageError for an unknown
    name, ClusterError if the daemon does not run.
    """
    with locked(layout):
        current = state.running(layout)
        if jobs and name == SLURMCTLD:
            raise UsageError("kill --jobs is for nodes: no job runs on slurmctld")
        daemon = current.process(_daemon_name(current, name))
        if daemon is None or not current.alive(daemon):
            raise ClusterError(f"{name} is not running; start it: hpc/minicluster start {name}")
        on_node = find_on_node(layout, name) if jobs else []
        killed = [daemon, *(process for process in on_node if process.pid != daemon.pid)]
        for process in killed:
            send(process, signal.SIGKILL)
        if not wait_until(lambda: not any(process.alive() for process in killed), 10.0):
            raise ClusterError(f"{name} did not end after SIGKILL")
        return f"killed: {daemon.name}" + f" and {len(killed) - 1} processes on it" * jobs


def start(layout: Layout, name: str, say: Callable[[str], None]) -> str:
    """Start a daemon that was killed as `up` did, and wait until it serves; return what was done.

    Raises UsageError for a name that is none.
    """
    with locked(layout):
        current = state.running(layout)
        daemon = current.process(_daemon_name(current, name))
        if daemon is not None and current.alive(daemon):
            return f"{name} is already running"
        Starter(plan_of(layout, current), current, say).restart(name)
        return f"started: {_daemon_name(current, name)}"


def _daemon_name(current: State, name: str) -> str:
    """The daemon's name in the state; UsageError for what is neither a node nor slurmctld."""
    nodes = current.options.node_names
    if name != SLURMCTLD and name not in nodes:
        raise UsageError(f"{name}: must be slurmctld or a node, {nodes[0]} to {nodes[-1]}")
    return name if name == SLURMCTLD else slurmd_of(name)


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    """Turn a signal into Interrupted, so that what was begun is undone."""
    raise Interrupted(signum)


@contextmanager
def _on_signals(handler: signal._HANDLER) -> Iterator[None]:
    before = {signum: signal.signal(signum, handler) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
