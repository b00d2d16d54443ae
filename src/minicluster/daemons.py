"""Start the daemons, each in the foreground of a session of its own, and wait for each."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from jobkit.errors import NotStarted
from minicluster import machine
from minicluster.config import Cluster
from minicluster.machine import ask, command, node_states
from minicluster.processes import MARK, members

WAIT_S = 60.0  # far above what was measured: a machine may be busy


def daemon_names(cluster: Cluster) -> list[str]:
    """The daemons that every cluster with these options has."""
    accounting = ["mariadbd", "slurmdbd"] if cluster.accounting else []
    holders = [f"net-{node}" for node in cluster.node_names if cluster.subnet]
    slurmds = [f"slurmd.{node}" for node in cluster.node_names]
    return ["munged", *accounting, *holders, "slurmctld", *slurmds]


class Starter:
    """Starts daemons of a cluster; each carries the cluster's mark and its own name."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.root = cluster, cluster.root
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start_all(self, say: Callable[[str], None]) -> None:
        say("starting munge")
        run, munge = self.root / "run", str(self.cluster.munge_socket)
        options = [f"--key-file={self.root}/munge.key", f"--socket={munge}"]
        options += [f"--pid-file={run}/munged.pid", f"--seed-file={run}/munge.seed"]
        self._spawn("munged", "munged", "--foreground", "--force", *options)
        self._wait("munged", lambda: _accepts(socket.AF_UNIX, munge))
        if self.cluster.subnet:
            self._start_holders()  # they make the address of slurmdbd, too
        if self.cluster.accounting:
            say("starting the accounting: MariaDB, slurmdbd")
            self._start_database()
            self._spawn("slurmdbd", "slurmdbd", "-D")
            listing = ("sacctmgr", "-n", "list", "cluster")
            self._wait("slurmdbd", lambda: ask(self.root, *listing) is not None)
        say(f"starting slurmctld, and slurmd of {self.cluster.node_range}")
        self._spawn("slurmctld", "slurmctld", "-D", "-f", f"{self.root}/slurm.conf")
        # A slurmd that does not find it at once tries again only a second later.
        address = (self.cluster.control_address, self.cluster.base_port)
        self._wait("slurmctld", lambda: _accepts(socket.AF_INET, address))
        self.start_slurmds(self.cluster.node_names)
        idle = dict.fromkeys(self.cluster.node_names, "idle")
        self._wait("the nodes", lambda: node_states(self.root) == idle, 0.05)

    def _start_database(self) -> None:
        (self.root / "db" / "mysql").mkdir(parents=True)
        process = self._popen("mariadb-bootstrap", *_mariadbd(self.root), "--bootstrap", stdin=-1)
        process.communicate(_system_tables(), timeout=2 * WAIT_S)
        if process.returncode:
            raise self._failed("mariadb-bootstrap")
        port, run = self.cluster.base_port + 2, self.root / "run"
        options = f"""
            --socket={run}/db.sock --pid-file={run}/mariadbd.pid --bind-address=127.0.0.1
            --port={port} --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900
            --init-file={self.root}/db-init.sql
        """.split()
        self._spawn("mariadbd", *_mariadbd(self.root), *options)
        self._wait("mariadbd", lambda: _accepts(socket.AF_INET, ("127.0.0.1", port)))

    def _start_holders(self) -> None:
        """Make the namespaces of each node, and a process that keeps them, and connect them."""
        words = ["unshare", "--mount", "--net", "--uts", "--propagation", "slave", "sh", "-c"]
        words += ['set -e; hostname "$1"; mount --bind hosts /etc/hosts; echo; exec sleep infinity']
        names = {node: f"net-{node}" for node in self.cluster.node_names}
        holders = {node: self._spawn(name, *words, name, node) for node, name in names.items()}
        outputs = [self._output(name) for name in names.values()]
        self._wait("the namespaces", lambda: all(o.read_text() == "\n" for o in outputs), 0.01)
        machine.create_network(self.cluster, holders)

    def start_slurmds(self, nodes: list[str]) -> None:
        holders = {member.name: member.pid for member in members(self.root)}
        for node in nodes:
            words = ["slurmd", "-D", "-N", node, "-f", f"{self.root}/slurm.conf"]
            if holder := holders.get(f"net-{node}"):
                inside = ["nsenter", f"--target={holder}", "--mount", "--net", "--uts"]
                words = [*inside, command("slurmd"), *words[1:]]
            (self.root / "spool" / node).mkdir(exist_ok=True)
            self._spawn(f"slurmd.{node}", *words)

    # --- one process --------------------------------------------------------------------------

    def _output(self, name: str) -> Path:
        """What a daemon writes to its standard output and error."""
        return self.root / "log" / f"{name}.out"

    def _popen(
        self, name: str, *words: str, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        # Not the user's: a daemon must not carry what happened to be set in a shell.
        env = {"PATH": machine.search_path(), "LANG": "C.UTF-8", MARK: f"{self.root}:{name}"}
        env |= {key: os.environ[key] for key in ("HOME", "TZ") if key in os.environ}
        env["SLURM_CONF"] = f"{self.root}/slurm.conf"
        with self._output(name).open("ab") as output:
            return subprocess.Popen(
                [command(words[0]), *words[1:]], cwd=self.root, env=env, stdin=stdin,
                stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is not for them
            )  # fmt: skip

    def _spawn(self, name: str, *words: str) -> int:
        self._started[name] = self._popen(name, *words)
        return self._started[name].pid

    def _failed(self, name: str) -> NotStarted:
        return NotStarted(f"{name} ended when it was started; {self._last_lines(name)}")

    def _last_lines(self, name: str) -> str:
        path = self._output(name)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        return f"{path} ends: {' | '.join([line for line in lines if line.strip()][-8:])}"

    def _wait(self, what: str, ready: Callable[[], bool], interval_s: float = 0.02) -> None:
        """Wait until it is ready; fail at once when any of the daemons has ended."""
        limit_s = WAIT_S + len(self._started)  # hundreds share the cores
        deadline = time.monotonic() + limit_s
        while True:
            if ended := [n for n, process in self._started.items() if process.poll() is not None]:
                raise self._failed(ended[0])
            if ready():
                return
            if time.monotonic() > deadline:
                last = self._last_lines([*self._started][-1])
                raise NotStarted(f"{what} not ready after {limit_s:.0f} s; {last}")
            time.sleep(interval_s)


def _accepts(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.connect(address)
        return True
    return False


# mariadb-install-db also fills the tables of its help texts, which takes three times as long as
# all the rest: hence MariaDB's own files of statements, called mysql_... up to 10.11.
_SQL_FOLDERS = (Path("/usr/share/mysql"), Path("/usr/share/mariadb"))
_SQL_FILES = ("system_tables.sql", "performance_tables.sql", "system_tables_data.sql")


def _system_tables() -> bytes:
    statements = b"USE mysql;\n"
    for name in _SQL_FILES:
        paths = [path for folder in _SQL_FOLDERS for path in folder.glob(f"m*_{name}")]
        if not paths:
            raise NotStarted(f"mariadb-server-core has no file m*_{name}; is it whole?")
        statements += paths[0].read_bytes()
    return statements


def _mariadbd(root: Path) -> list[str]:
    """Small, and careless about power cuts: the data is thrown away by `down`."""
    options = f"""
        --no-defaults --datadir={root}/db --innodb-log-file-size=8M
        --innodb-data-file-path=ibdata1:4M:autoextend
        --innodb-temp-data-file-path=ibtmp1:4M:autoextend --innodb-flush-log-at-trx-commit=0
        --innodb-doublewrite=0 --innodb-flush-method=nosync --skip-name-resolve
    """.split()
    return ["mariadbd", *options, *(["--user=root"] if os.geteuid() == 0 else [])]
