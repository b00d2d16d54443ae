"""The text of every configuration file, made by pure functions from one Plan.

Why each unusual key is there is said beside it, in the file that is written, so that the file
can be read by someone who learns Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minicluster.layout import MAX_NODES, MAX_NODES_NETNS, Layout, Ports, UsageError

MAX_CORES = 1024
MAX_GPUS = 64
MANY_NODES = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for."""

    nodes: int = 4  # 1 to 256; to 253 with netns
    cores: int = 8  # of each node, simulated: they share the machine's
    gpus: int = 4  # of each node, simulated; 0 for none
    memory_mib: int = 4000  # of each node, simulated
    accounting: bool = True
    preemption: bool = False
    netns: bool = False
    memory_limits: bool = False
    enforce: bool = False  # jobs need an account and a QOS that the accounting knows

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("--nodes", self.nodes, 1, MAX_NODES),
            ("--cores", self.cores, 1, MAX_CORES),
            ("--gpus", self.gpus, 0, MAX_GPUS),
            ("--memory", self.memory_mib, 64, 1 << 24),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name} {value}: must be from {low} to {high}")
        if self.netns and self.nodes > MAX_NODES_NETNS:
            raise UsageError(f"--nodes {self.nodes}: at most {MAX_NODES_NETNS} with --netns")
        if self.enforce and not self.accounting:
            raise UsageError("--enforce needs the accounting: leave --no-accounting out")

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    @property
    def node_range(self) -> str:
        """All nodes as Slurm writes them: n1, or n[1-4]."""
        return "n1" if self.nodes == 1 else f"n[1-{self.nodes}]"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that the files depend on: the options, and what this machine gave."""

    options: Options
    layout: Layout
    ports: Ports
    host: str  # this machine's short host name
    user: str  # who runs the daemons
    subnet: str | None = None  # "10.77.3": the nodes' network, with --netns
    names_resolve: bool = False  # jobs see the node names in /etc/hosts
    database_password: str = field(default="", repr=False)

    @property
    def control_address(self) -> str:
        """Where nodes and commands reach slurmctld and slurmdbd."""
        return f"{self.subnet}.254" if self.subnet else "127.0.0.1"

    def node_address(self, index: int) -> str:
        return f"{self.subnet}.{index}" if self.subnet else "127.0.0.1"

    @property
    def partitions(self) -> list[str]:
        return ["batch", "urgent"] if self.options.preemption else ["batch"]


def slurm_conf(plan: Plan) -> str:
    """slurm.conf, whole."""
    parts = [
        _controller(plan),
        _scheduling(plan),
        _limits(plan),
        _accounting(plan),
        _nodes(plan),
        _partitions(plan),
    ]
    head = "# Written by hpc/minicluster. Each `up` rewrites it.\n"
    return head + "\n" + "\n".join(part for part in parts if part)


def _controller(plan: Plan) -> str:
    at = plan.layout
    return f"""\
ClusterName=minicluster
SlurmctldHost={plan.host}({plan.control_address})
SlurmctldPort={plan.ports.slurmctld}
SlurmUser={plan.user}
SlurmdUser={plan.user}
AuthType=auth/munge
# A requeued job waits for cred_expire and a second: two minutes by default.
AuthInfo=socket={at.munge_socket},cred_expire=6
StateSaveLocation={at.controller_state}
SlurmdSpoolDir={at.spool}/%n
SlurmctldPidFile={at.run}/slurmctld.pid
SlurmdPidFile={at.run}/slurmd.%n.pid
SlurmctldLogFile={at.log}/slurmctld.log
SlurmdLogFile={at.log}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
# For srun --resv-ports.
MpiParams=ports={plan.ports.steps}
# Job ids of two clusters on one machine differ: MASTER_PORT is derived from the id.
FirstJobId={plan.ports.base * 10}
"""


def _scheduling(plan: Plan) -> str:
    tcp = "TCPTimeout=3\n" if plan.subnet else ""
    patience = "SlurmdTimeout=20\n"
    if plan.options.nodes > MANY_NODES:
        patience = (
            "# So many nodes on one machine answer late.\nSlurmdTimeout=120\nMessageTimeout=60\n"
        )
    preempt = "PreemptType=preempt/none\n"
    if plan.options.preemption:
        preempt = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
    return f"""\
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=5
# Without it a job for more nodes than there are waits forever instead of being refused.
EnforcePartLimits=ALL
KillWait=5
MinJobAge=300
SlurmctldTimeout=30
{patience}# A node that was away comes back by itself.
ReturnToService=2
{tcp}{preempt}"""


def _limits(plan: Plan) -> str:
    # proctrack/linuxproc would leave processes behind that ignore TERM.
    select, frequency, gather = "CR_Core", 2, ""
    if plan.options.memory_limits:
        select, frequency = "CR_Core_Memory", 1
        gather = "JobAcctGatherParams=OverMemoryKill\n"
    return f"""\
SelectType=select/cons_tres
SelectTypeParameters={select}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency={frequency}
{gather}"""


def _accounting(plan: Plan) -> str:
    lines = ["JobCompType=jobcomp/filetxt", f"JobCompLoc={plan.layout.log}/jobcomp.txt"]
    if not plan.options.accounting:
        lines.append("AccountingStorageType=accounting_storage/none")
    else:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={plan.control_address}",
            f"AccountingStoragePort={plan.ports.slurmdbd}",
            "# The munge socket, because it is not at its usual place.",
            f"AccountingStoragePass={plan.layout.munge_socket}",
        ]
        if plan.options.gpus:
            lines.append("AccountingStorageTRES=gres/gpu")
        if plan.options.enforce:
            lines.append("AccountingStorageEnforce=associations,limits,qos")
    return "\n".join(lines) + "\n"


def _nodes(plan: Plan) -> str:
    options = plan.options
    lines = [
        "# The nodes have the cores and memory said here, whatever the machine has.",
        "SlurmdParameters=config_overrides",
    ]
    if options.gpus:
        lines.append("GresTypes=gpu")
    cores = options.cores
    hardware = f"CPUs={cores} CoresPerSocket={cores} RealMemory={options.memory_mib}"
    gres = f" Gres=gpu:{options.gpus}" if options.gpus else ""
    for index, name in enumerate(options.node_names, start=1):
        hostname = name if plan.subnet else plan.host
        # With --netns each node has all ports of its own.
        port = plan.ports.slurmd(1 if plan.subnet else index)
        lines.append(
            f"NodeName={name} NodeHostname={hostname} NodeAddr={plan.node_address(index)} "
            f"Port={port} {hardware}{gres}"
        )
    return "\n".join(lines) + "\n"


def _partitions(plan: Plan) -> str:
    options = plan.options
    common = f"Nodes={options.node_range} DefaultTime=1:00:00 MaxTime=1-00:00:00 State=UP"
    if options.memory_limits:
        # A job that names no --mem gets its cores' share, not the whole node.
        common += f" DefMemPerCPU={max(1, options.memory_mib // options.cores)}"
    if not options.preemption:
        return f"PartitionName=batch Default=YES {common}\n"
    return (
        f"PartitionName=batch Default=YES PriorityTier=1 {common}\n"
        "# Its jobs requeue jobs of batch when they need the place.\n"
        f"PartitionName=urgent PriorityTier=10 PreemptMode=OFF {common}\n"
    )


def slurmdbd_conf(plan: Plan) -> str:
    """slurmdbd.conf; it holds the database's password, so the file's mode must be 600."""
    at = plan.layout
    return f"""\
AuthType=auth/munge
AuthInfo=socket={at.munge_socket}
DbdHost={plan.host}
DbdAddr={plan.control_address}
DbdPort={plan.ports.slurmdbd}
SlurmUser={plan.user}
PidFile={at.run}/slurmdbd.pid
LogFile={at.log}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={plan.ports.mariadb}
StorageUser=slurm
StoragePass={plan.database_password}
StorageLoc=slurm_acct_db
"""


def database_sql(plan: Plan) -> str:
    """What MariaDB runs at its start: nobody but slurmdbd, with the password, may log in."""
    return f"""\
DELETE FROM mysql.global_priv WHERE User <> 'mariadb.sys';
FLUSH PRIVILEGES;
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{plan.database_password}';
GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';
"""


def gres_conf(plan: Plan) -> str:
    """gres.conf: GPUs are character devices, else CUDA_VISIBLE_DEVICES stays empty."""
    if not plan.options.gpus:
        return "AutoDetect=off\n"
    last = plan.options.gpus - 1
    files = f"{plan.layout.devices}/gpu0" if last == 0 else f"{plan.layout.devices}/gpu[0-{last}]"
    return f"AutoDetect=off\nNodeName={plan.options.node_range} Name=gpu File={files}\n"


def cgroup_conf(plan: Plan) -> str:
    """cgroup.conf, with which no cgroup is made or looked for."""
    return f"""\
# Nothing is limited, so that any machine will do: slurmd would refuse to start where it finds
# neither version of cgroups as it expects them. It looks in this empty folder and is content.
CgroupPlugin=cgroup/v1
CgroupMountpoint={plan.layout.run}
CgroupAutomount=no
"""


def hosts(plan: Plan, machine_hosts: str) -> str:
    """/etc/hosts as jobs see it: our names first, then the machine's own lines."""
    lines = ["# Written by hpc/minicluster; jobs see it as /etc/hosts."]
    if plan.subnet:
        lines.append(f"{plan.control_address} {plan.host}")
    for index, name in enumerate(plan.options.node_names, start=1):
        lines.append(f"{plan.node_address(index)} {name}")
    return "\n".join(lines) + "\n" + machine_hosts
