"""Start the daemons, each in the foreground of a session of its own, and wait for each."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from minicluster import network, state
from minicluster.config import Plan
from minicluster.layout import ClusterError, Layout
from minicluster.machine import ask, command, node_states, search_path
from minicluster.processes import MARK, identify, wait_until
from minicluster.state import State

WAIT_S = 60.0  # far above what was measured: a machine may be busy
_SHARED_HOLDER = "names"
SLURMCTLD = "slurmctld"


def tail(paths: list[Path], lines: int = 12) -> str:
    """The last lines of each log that says something, under its path."""
    parts = []
    for path in paths:
        text = path.read_text(errors="replace") if path.exists() else ""
        if text.strip():
            shown = "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
            parts.append(f"  last lines of {path}:\n{shown}")
    return "\n".join(parts) or "  (its log is empty)"


class Starter:
    """Starts the daemons of one cluster and writes each into the state at once."""

    def __init__(self, plan: Plan, current: State, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.layout: Layout = plan.layout
        self.state = current
        self.say = say
        self._lost = set(current.dead())  # ended before, on purpose or not

    def start_all(self) -> None:
        self.say("starting munge")
        self.start_munge()
        holders = self.start_holders()  # with --netns they make the address of slurmdbd, too
        if self.plan.options.accounting:
            self.say("starting the accounting: MariaDB, slurmdbd")
            self.start_database()
            self.start_slurmdbd()
        self.say(f"starting slurmctld, and slurmd of {self.plan.options.node_range}")
        self.start_slurmctld()
        for name in self.plan.options.node_names:
            self.start_slurmd(name, holders.get(name))
        self._wait("the nodes", self._all_idle, 0.05)

    def start_munge(self) -> None:
        run = self.layout.run
        files = {
            "key-file": self.layout.munge_key,
            "socket": self.layout.munge_socket,
            "pid-file": run / "munged.pid",
            "seed-file": run / "munge.seed",
        }
        options = [f"--{key}={value}" for key, value in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *options])
        self._wait("munged", lambda: _accepts(socket.AF_UNIX, str(self.layout.munge_socket)))

    def start_database(self) -> None:
        self.layout.database.mkdir()
        (self.layout.database / "mysql").mkdir()
        self._finish(
            "mariadb-bootstrap", [*_mariadbd(self.layout), "--bootstrap"], _system_tables()
        )
        self._spawn("mariadbd", _serve_command(self.plan))
        address = ("127.0.0.1", self.plan.ports.mariadb)
        self._wait("mariadbd", lambda: _accepts(socket.AF_INET, address))

    def start_slurmdbd(self) -> None:
        self._spawn("slurmdbd", ["slurmdbd", "-D"])
        self._wait(
            "slurmdbd",
            lambda: ask(self.layout, "sacctmgr", "-n", "list", "cluster") is not None,
        )

    def start_holders(self) -> dict[str, int]:
        """A process in the namespaces of each node, whose pid leads into them; by node.

        With --netns one for each node; else one for all nodes, for the names alone; none for
        an ordinary user.
        """
        names = self.plan.options.node_names
        if self.plan.subnet:
            holders = {name: self._hold(f"net-{name}", name) for name in names}
            chosen = network.Network(self.layout, self.plan.subnet)
            network.create(chosen, dict(enumerate(holders.values(), start=1)))
            return holders
        if self.plan.names_resolve:
            return dict.fromkeys(names, self._hold(_SHARED_HOLDER, ""))
        return {}

    def _hold(self, name: str, hostname: str) -> int:
        """Make the namespaces, and a process that keeps them; returns its pid."""
        script = 'set -e; [ -z "$2" ] || hostname "$2"; mount --bind "$1" /etc/hosts; '
        script += "echo ready; exec sleep infinity"
        kinds = ["--net", "--uts"] if hostname else []
        argv = ["unshare", "--mount", *kinds, "--propagation", "slave"]
        argv += ["sh", "-c", script, name, str(self.layout.hosts), hostname]
        pid = self._spawn(name, argv)
        output = self.layout.output(name)
        self._wait(name, lambda: output.read_text().startswith("ready"), 0.01)
        return pid

    def start_slurmctld(self) -> None:
        self._spawn(SLURMCTLD, ["slurmctld", "-D", "-f", str(self.layout.slurm_conf)])
        # A slurmd that does not find it at once tries again only a second later.
        address = (self.plan.control_address, self.plan.ports.slurmctld)
        self._wait("slurmctld", lambda: _accepts(socket.AF_INET, address))

    def restart(self, name: str) -> None:
        """Start a node's slurmd, or slurmctld, again as it was, and wait until it serves."""
        self.state.forget(SLURMCTLD if name == SLURMCTLD else slurmd_of(name))
        if name == SLURMCTLD:
            self.start_slurmctld()
            self._wait("the nodes", self._all_known, 0.2)
            return
        holder = self.state.process(f"net-{name}") or self.state.process(_SHARED_HOLDER)
        self.start_slurmd(name, holder.pid if holder else None)
        if SLURMCTLD not in self._lost:
            self._wait(name, lambda: self._serves(name), 0.2)

    def _all_known(self) -> bool:
        """Whether slurmctld has heard of every node whose slurmd runs."""
        dead, states = self.state.dead(), node_states(self.layout)
        names = [n for n in self.plan.options.node_names if slurmd_of(n) not in dead]
        return all("unknown" not in states.get(name, "unknown") for name in names)

    def _serves(self, name: str) -> bool:
        """Whether Slurm has the node; a star means that it does not answer."""
        shown = node_states(self.layout).get(name, "down")
        return not shown.startswith(("down", "drain")) and "*" not in shown

    def start_slurmd(self, name: str, holder: int | None) -> None:
        argv = ["slurmd", "-D", "-N", name, "-f", str(self.layout.slurm_conf)]
        if holder is not None:
            kinds = ["--net", "--uts"] if self.plan.subnet else []
            inside = ["nsenter", f"--target={holder}", "--mount", *kinds]
            argv = [*inside, command("slurmd"), *argv[1:]]
        (self.layout.spool / name).mkdir(exist_ok=True)
        self._spawn(slurmd_of(name), argv)

    def _all_idle(self) -> bool:
        states, names = node_states(self.layout), self.plan.options.node_names
        return all(states.get(name) == "idle" for name in names)

    def _environment(self) -> dict[str, str]:
        """Not the user's: a daemon must not carry what happened to be set in a shell."""
        new = {"PATH": search_path(), "LANG": "C.UTF-8", MARK: str(self.layout.root)}
        new["SLURM_CONF"] = str(self.layout.slurm_conf)
        return new | {key: os.environ[key] for key in ("HOME", "TZ") if key in os.environ}

    def _popen(
        self, name: str, argv: list[str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with self.layout.output(name).open("ab") as output:
            return subprocess.Popen(
                [command(argv[0]), *argv[1:]],
                cwd=self.layout.root,
                env=self._environment(),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is not for them
            )

    def _spawn(self, name: str, argv: list[str]) -> int:
        pid = self._popen(name, argv).pid
        process = identify(name, pid)
        if process is None:
            raise self._failed(name)
        self.state.processes.append(process)
        state.save(self.layout, self.state)
        return pid

    def _finish(self, name: str, argv: list[str], text: bytes) -> None:
        """Run a command to its end, with the text as its input."""
        process = self._popen(name, argv, subprocess.PIPE)
        process.communicate(text, timeout=2 * WAIT_S)
        if process.returncode:
            raise self._failed(name)

    def _failed(self, name: str) -> ClusterError:
        log = self.layout.output(name)
        return ClusterError(f"{name} ended when it was started\n{tail([log])}")

    def _wait(self, what: str, ready: Callable[[], bool], interval_s: float = 0.02) -> None:
        """Wait until it is ready; fail at once when any of the daemons has ended."""

        def decided() -> bool:
            return bool(self._newly_dead()) or ready()

        limit_s = WAIT_S + len(self.state.processes)  # hundreds share the cores
        in_time = wait_until(decided, limit_s, interval_s)
        if dead := self._newly_dead():
            raise self._failed(dead[0])
        if not in_time:
            logs = [self.layout.output(process.name) for process in self.state.processes]
            raise ClusterError(f"{what} not ready after {limit_s:.0f} s\n{tail(logs, 4)}")

    def _newly_dead(self) -> list[str]:
        """The daemons that have ended since we began, by name."""
        return [name for name in self.state.dead() if name not in self._lost]


def slurmd_of(node: str) -> str:
    """The name of a node's daemon in the state."""
    return f"slurmd.{node}"


def _accepts(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


# mariadb-install-db also fills the tables of its help texts, which takes three times as long as
# all the rest: hence MariaDB's own files of statements, called mysql_... up to 10.11.
_SQL_FOLDERS = (Path("/usr/share/mysql"), Path("/usr/share/mariadb"))
_SQL_FILES = ("system_tables.sql", "performance_tables.sql", "system_tables_data.sql")


def _system_tables() -> bytes:
    """The statements that make the system tables."""
    statements = b"USE mysql;\n"
    for name in _SQL_FILES:
        paths = [path for folder in _SQL_FOLDERS for path in folder.glob(f"m*_{name}")]
        if not paths:
            raise ClusterError(f"mariadb-server-core has no file m*_{name}; is it whole?")
        statements += paths[0].read_bytes()
    return statements


def _mariadbd(layout: Layout) -> list[str]:
    """Small, and careless about power cuts: the data is thrown away by `down`."""
    options = f"""
        --no-defaults --datadir={layout.database} --innodb-log-file-size=8M
        --innodb-data-file-path=ibdata1:4M:autoextend
        --innodb-temp-data-file-path=ibtmp1:4M:autoextend --innodb-flush-log-at-trx-commit=0
        --innodb-doublewrite=0 --innodb-flush-method=nosync --skip-name-resolve
    """.split()
    return ["mariadbd", *options, *(["--user=root"] if os.geteuid() == 0 else [])]


def _serve_command(plan: Plan) -> list[str]:
    at = plan.layout
    options = f"""
        --socket={at.run}/db.sock --pid-file={at.run}/mariadbd.pid --bind-address=127.0.0.1
        --port={plan.ports.mariadb} --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900
        --init-file={at.database_sql}
    """.split()
    return [*_mariadbd(at), *options]
