"""A cluster: what was asked for, its ports, and the text of every configuration file.

Why each unusual key is there is said beside it, in the file that is written, so that the file
can be read by someone who learns Slurm.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import socket
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.errors import UsageError
from jobkit.paths import read_json, write_json

STATE_FILE = "minicluster.json"
MAX_NODES = 256  # by their ports; with netns 253, by their addresses
MANY_NODES = 64


@dataclass(kw_only=True)
class Cluster:
    """A cluster, as minicluster.json in its folder keeps it.

    Ports from base_port on: slurmctld, slurmdbd, MariaDB; from 11 a slurmd each; from 300 srun's.
    """

    root: Path  # its folder
    nodes: int = 4
    cores: int = 8  # of each node, simulated: they share the machine's
    gpus: int = 4  # of each node, simulated; 0 for none
    memory_mib: int = 4000  # of each node, simulated
    accounting: bool = True
    preemption: bool = False
    netns: bool = False
    memory_limits: bool = False
    enforce: bool = False  # jobs need an account and a QOS that the accounting knows
    base_port: int = 0
    subnet: str = ""  # "10.77.3": the nodes' network, with netns
    cut: list[str] = field(default_factory=list)  # the nodes whose link is cut

    @classmethod
    def load(cls, root: Path) -> Cluster | None:
        """The cluster of a folder; None where there is none, or its file is not to be read."""
        try:
            return cls(root=root, **(read_json(root / STATE_FILE) or {"absent": True}))
        except TypeError:
            return None

    def save(self) -> None:
        write_json(self.root / STATE_FILE, {k: v for k, v in vars(self).items() if k != "root"})

    def asked(self) -> dict[str, object]:
        """What the user asked for."""
        chosen_here = ("base_port", "subnet", "cut")
        return {name: value for name, value in vars(self).items() if name not in chosen_here}

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    @property
    def node_range(self) -> str:
        """All nodes as Slurm writes them: n1, or n[1-4]."""
        return "n1" if self.nodes == 1 else f"n[1-{self.nodes}]"

    @property
    def munge_socket(self) -> Path:
        return self.root / "run" / "munge.sock"

    @property
    def control_address(self) -> str:
        """Where nodes and commands reach slurmctld and slurmdbd."""
        return f"{self.subnet}.254" if self.subnet else "127.0.0.1"

    def node_address(self, index: int) -> str:
        return f"{self.subnet}.{index}" if self.subnet else "127.0.0.1"

    def slurmd_port(self, index: int) -> int:
        """The port of node number `index`, counted from 1."""
        return self.base_port + 10 + index

    def ports(self) -> list[int]:
        """Every port that a daemon will listen on."""
        slurmds = [self.slurmd_port(index) for index in range(1, self.nodes + 1)]
        return [*range(self.base_port, self.base_port + 3), *slurmds]


def tag(root: Path) -> str:
    """Eight characters that differ between folders, for the names of network links and locks."""
    return hashlib.sha256(os.fsencode(root)).hexdigest()[:8]


def short_host() -> str:
    return socket.gethostname().split(".")[0]


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UsageError(
            f"user id {os.geteuid()} has no name in /etc/passwd; Slurm needs one"
        ) from None


def slurm_conf(cluster: Cluster) -> str:
    """slurm.conf, whole."""
    root, port, user = cluster.root, cluster.base_port, user_name()
    patience, tcp, preempt = "SlurmdTimeout=20\n", "", "PreemptType=preempt/none\n"
    if cluster.nodes > MANY_NODES:
        patience = (
            "# So many nodes on one machine answer late.\nSlurmdTimeout=120\nMessageTimeout=60\n"
        )
    if cluster.subnet:
        tcp = "TCPTimeout=3\n"
    if cluster.preemption:
        preempt = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
    select, frequency, gather = "CR_Core", 2, ""
    if cluster.memory_limits:
        select, frequency = "CR_Core_Memory", 1
        gather = "JobAcctGatherParams=OverMemoryKill\n"
    # proctrack/linuxproc would leave processes behind that ignore TERM.
    return f"""\
# Written by hpc/minicluster. Each `up` rewrites it.

ClusterName=minicluster
SlurmctldHost={short_host()}({cluster.control_address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits for cred_expire and a second: two minutes by default.
AuthInfo=socket={cluster.munge_socket},cred_expire=6
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
# For srun --resv-ports.
MpiParams=ports={port + 300}-{port + 399}
# Job ids of two clusters on one machine differ: MASTER_PORT is derived from the id.
FirstJobId={port * 10}

SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=5
# Without it a job for more nodes than there are waits forever instead of being refused.
EnforcePartLimits=ALL
KillWait=5
MinJobAge=300
SlurmctldTimeout=30
{patience}# A node that was away comes back by itself.
ReturnToService=2
{tcp}{preempt}
SelectType=select/cons_tres
SelectTypeParameters={select}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency={frequency}
{gather}
{_accounting(cluster)}
{_nodes(cluster)}
{_partitions(cluster)}"""


def _accounting(cluster: Cluster) -> str:
    lines = ["JobCompType=jobcomp/filetxt", f"JobCompLoc={cluster.root}/log/jobcomp.txt"]
    if not cluster.accounting:
        lines.append("AccountingStorageType=accounting_storage/none")
    else:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={cluster.control_address}",
            f"AccountingStoragePort={cluster.base_port + 1}",
            "# The munge socket, because it is not at its usual place.",
            f"AccountingStoragePass={cluster.munge_socket}",
        ]
        if cluster.gpus:
            lines.append("AccountingStorageTRES=gres/gpu")
        if cluster.enforce:
            lines.append("AccountingStorageEnforce=associations,limits,qos")
    return "\n".join(lines) + "\n"


def _nodes(cluster: Cluster) -> str:
    lines = [
        "# The nodes have the cores and memory said here, whatever the machine has.",
        "SlurmdParameters=config_overrides",
    ]
    if cluster.gpus:
        lines.append("GresTypes=gpu")
    cores = cluster.cores
    hardware = f"CPUs={cores} CoresPerSocket={cores} RealMemory={cluster.memory_mib}"
    gres = f" Gres=gpu:{cluster.gpus}" if cluster.gpus else ""
    for index, name in enumerate(cluster.node_names, start=1):
        hostname = name if cluster.subnet else short_host()
        # With --netns each node has all ports of its own.
        port = cluster.slurmd_port(1 if cluster.subnet else index)
        lines.append(
            f"NodeName={name} NodeHostname={hostname} NodeAddr={cluster.node_address(index)} "
            f"Port={port} {hardware}{gres}"
        )
    return "\n".join(lines) + "\n"


def _partitions(cluster: Cluster) -> str:
    common = f"Nodes={cluster.node_range} DefaultTime=1:00:00 MaxTime=1-00:00:00 State=UP"
    if cluster.memory_limits:
        # A job that names no --mem gets its cores' share, not the whole node.
        common += f" DefMemPerCPU={max(1, cluster.memory_mib // cluster.cores)}"
    if not cluster.preemption:
        return f"PartitionName=batch Default=YES {common}\n"
    return (
        f"PartitionName=batch Default=YES PriorityTier=1 {common}\n"
        "# Its jobs requeue jobs of batch when they need the place.\n"
        f"PartitionName=urgent PriorityTier=10 PreemptMode=OFF {common}\n"
    )


def slurmdbd_conf(cluster: Cluster, password: str) -> str:
    """slurmdbd.conf; it holds the database's password, so the file's mode must be 600."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={cluster.munge_socket}
DbdHost={short_host()}
DbdAddr={cluster.control_address}
DbdPort={cluster.base_port + 1}
SlurmUser={user_name()}
PidFile={cluster.root}/run/slurmdbd.pid
LogFile={cluster.root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={cluster.base_port + 2}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""


def database_sql(password: str) -> str:
    """What MariaDB runs at its start: nobody but slurmdbd, with the password, may log in."""
    return f"""\
DELETE FROM mysql.global_priv WHERE User <> 'mariadb.sys';
FLUSH PRIVILEGES;
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';
"""


def gres_conf(cluster: Cluster) -> str:
    """gres.conf: GPUs are character devices, else CUDA_VISIBLE_DEVICES stays empty."""
    if not cluster.gpus:
        return "AutoDetect=off\n"
    files = f"{cluster.root}/dev/gpu" + (f"[0-{cluster.gpus - 1}]" if cluster.gpus > 1 else "0")
    return f"AutoDetect=off\nNodeName={cluster.node_range} Name=gpu File={files}\n"


def cgroup_conf(cluster: Cluster) -> str:
    """cgroup.conf, with which no cgroup is made or looked for."""
    return f"""\
# Nothing is limited, so that any machine will do: slurmd would refuse to start where it finds
# neither version of cgroups as it expects them. It looks in this empty folder and is content.
CgroupPlugin=cgroup/v1
CgroupMountpoint={cluster.root}/run
CgroupAutomount=no
"""


def hosts(cluster: Cluster, machine_hosts: str) -> str:
    """/etc/hosts as jobs see it: our names first, then the machine's own lines."""
    lines = ["# Written by hpc/minicluster; jobs see it as /etc/hosts."]
    if cluster.subnet:
        lines.append(f"{cluster.control_address} {short_host()}")
    for index, name in enumerate(cluster.node_names, start=1):
        lines.append(f"{cluster.node_address(index)} {name}")
    return "\n".join(lines) + "\n" + machine_hosts
