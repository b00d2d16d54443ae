"""A cluster: what was asked for, its ports, and the text of every configuration file.

Why each unusual key is there is said beside it, in the file that is written, so that the file
can be read by someone who learns Slurm.
"""

import hashlib
import os
import pwd
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from jobkit.errors import UsageError
from jobkit.paths import read_json, write_json

STATE_FILE = "minicluster.json"
MAX_NODES = 256  # by their ports
MANY_NODES = 64  # more on one machine answer late


@dataclass(kw_only=True)
class Cluster:
    """A cluster, as minicluster.json in its folder keeps it.

    Ports from base_port on: slurmctld, slurmdbd, MariaDB; from 11 a slurmd each; from 300 srun's.
    """

    root: Path  # its folder
    nodes: int = 4
    cores: int = 64  # of each node, simulated: they share the machine's
    gpus: int = 4  # of each node, simulated; 0 for none
    memory_mib: int = 32000  # of each node, simulated
    accounting: bool = True
    preemption: bool = False
    memory_limits: bool = False
    enforce: bool = False  # jobs need an account and a QOS that the accounting knows
    base_port: int = 0
    first_job: int = 0  # its id
    subnet: str = ""  # "10.77.3": the network of nodes in namespaces; else all are on 127.0.0.1

    @classmethod
    def load(cls, root: Path) -> Optional["Cluster"]:
        """The cluster of a folder; None where there is none, or its file is not to be read."""
        try:
            return cls(root=root, **(read_json(root / STATE_FILE) or {"absent": True}))
        except TypeError:
            return None

    def save(self) -> None:
        write_json(self.root / STATE_FILE, {k: v for k, v in vars(self).items() if k != "root"})

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
        return self.node_address(254)

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
    """Eight characters that differ between folders, for the names of network links."""
    return hashlib.sha256(os.fsencode(root)).hexdigest()[:8]


def short_host() -> str:
    return socket.gethostname().split(".")[0]


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UsageError(f"Slurm needs user id {os.geteuid()} in /etc/passwd") from None


def slurm_conf(cluster: Cluster) -> str:
    """slurm.conf, whole: what each cluster has, then what its options add."""
    root, port, user = cluster.root, cluster.base_port, user_name()
    timeout_s, message_s = (120, 60) if cluster.nodes > MANY_NODES else (20, 10)
    hardware = f"CPUs={cluster.cores} CoresPerSocket={cluster.cores}"
    hardware += f" RealMemory={cluster.memory_mib}"
    batch = f"Nodes={cluster.node_range} DefaultTime=1:00:00 MaxTime=1-00:00:00 State=UP"
    added, urgent, select = list[str](), list[str](), "CR_Core"
    if cluster.gpus:
        hardware += f" Gres=gpu:{cluster.gpus}"
        added += ["GresTypes=gpu"]
    if cluster.memory_limits:
        select = "CR_Core_Memory"
        added += ["JobAcctGatherParams=OverMemoryKill"]
        # A job that names no --mem gets its cores' share, not the whole node.
        batch += f" DefMemPerCPU={max(1, cluster.memory_mib // cluster.cores)}"
    if cluster.preemption:
        added += ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"]
        urgent = ["# Its jobs requeue jobs of batch when they need the place."]
        urgent += [f"PartitionName=urgent PriorityTier=10 PreemptMode=OFF {batch}"]
    if cluster.accounting:
        added += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={cluster.control_address}",
            f"AccountingStoragePort={port + 1}",
            "# The munge socket, because it is not at its usual place.",
            f"AccountingStoragePass={cluster.munge_socket}",
        ]
        if cluster.gpus:
            added += ["AccountingStorageTRES=gres/gpu"]
        if cluster.enforce:
            added += ["AccountingStorageEnforce=associations,limits,qos"]
    for index, name in enumerate(cluster.node_names, start=1):
        # In a namespace each node has a host name, and all ports, of its own.
        host, number = (name, 1) if cluster.subnet else (short_host(), index)
        place = f"NodeHostname={host} NodeAddr={cluster.node_address(index)}"
        added += [f"NodeName={name} {place} Port={cluster.slurmd_port(number)} {hardware}"]
    lines = "\n".join([*added, f"PartitionName=batch Default=YES {batch}", *urgent])
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
# No job has the id of one of an earlier cluster, whose studies may ask after it.
FirstJobId={cluster.first_job}

SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=5
# Without it a job for more nodes than there are waits forever instead of being refused.
EnforcePartLimits=ALL
KillWait=5
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout={timeout_s}
MessageTimeout={message_s}
TCPTimeout=3
# A node that was away comes back by itself.
ReturnToService=2

SelectType=select/cons_tres
SelectTypeParameters={select}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
# The nodes have the cores and memory said here, whatever the machine has.
SlurmdParameters=config_overrides

{lines}
"""


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
    files = f"gpu[0-{cluster.gpus - 1}]" if cluster.gpus > 1 else "gpu0"
    line = f"NodeName={cluster.node_range} Name=gpu File={cluster.root}/dev/{files}\n"
    return "AutoDetect=off\n" + (line if cluster.gpus else "")


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
