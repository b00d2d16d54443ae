"""The second half of a preflight's judgement, what ranks do together, and the report of it all."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jobkit.checks.preflight import judge
from jobkit.checks.preflight.judge import Facts, Finding, by_host, grouped, many, where
from jobkit.errors import Exit

# Where one of these found a fault, a group would only hang, or fail for a reason already told.
NEEDED_FOR_A_GROUP = ("presence", "ranks", "world", "gpus", "master", "port")
_ABSURD_MB_PER_S = 10.0  # less than Fast Ethernet: training would only wait
_SLOW_MB_PER_S = 100.0


@dataclass(frozen=True)
class Circumstances:
    """What the desk knows beside the facts of the ranks."""

    expected: int  # processes that were started
    waited_s: float
    port_fault: str  # why the master's port cannot be used
    heard: Sequence[Facts] = ()  # rank and host of all who came, those included who then hung


def judge_facts(facts: Sequence[Facts], around: Circumstances) -> list[Finding]:
    """All checks of what the ranks found out by themselves; the first facts are the desk's."""
    return [
        judge.presence(facts, around.expected, around.waited_s, around.heard),
        judge.places(facts),
        judge.world(facts),
        judge.gpus(facts),
        judge.cores(facts),
        judge.names(facts),
        port(facts[0], around.port_fault),
        judge.versions(facts),
        judge.clocks(facts),
        judge.writable(facts),
    ]


def judge_together(
    facts: Sequence[Facts], results: Sequence[Facts], told: Mapping[str, Any]
) -> list[Finding]:
    """All checks of what the ranks did together, as they were told."""
    found = [shared(facts, results, told["log_dir"]), data(facts, results)]
    if not told["group"]:
        text = "not checked: the faults above come first"
        return [*found, Finding("all_reduce", notes=[f"all_reduce, bandwidth: {text}"])]
    return [*found, all_reduce(facts, results), bandwidth(facts, results)]


def port(chief: Facts, fault: str) -> Finding:
    """The master's port is free, for torch's store to listen on."""
    port = chief["master_port"]
    found = Finding("port", f"{port} is free" if port else "none needed: one process")
    if fault:
        at = f"{chief['host']} ({chief['master_addr']})"
        fix = "end the program that holds it (ss -ltnp shows it), or set another MASTER_PORT; "
        fix += "unset, the port comes from the job's id"
        found.fault(at, f"port {chief['master_port']} cannot be used: {fault}", fix)
    return found


def shared(facts: Sequence[Facts], results: Sequence[Facts], folder: str) -> Finding:
    """A file that one node wrote to the run's folder is there on every node."""
    if not folder:
        return Finding("shared", notes=["shared: not checked, as no file could be written"])
    found = Finding("shared", f"{folder} is the same folder on {many(len(by_host(facts)), 'node')}")
    blind = [r for r in results if folder in r["hidden"]]
    if blind:
        text = f"{folder} is another folder here: a file that the master's node wrote is not there"
        fix = "choose a folder on a file system of all nodes with --run-dir (or JOBKIT_LOGS)"
        found.fault(where(blind), text, fix)
    return found


def data(facts: Sequence[Facts], results: Sequence[Facts]) -> Finding:
    """The prepared cache is whole on every node; or rank 0 can make it where all will see it."""
    chief = next((f for f in facts if "dataset" in f), None)
    if chief is None:
        return Finding("data", notes=["data: not checked, as no rank 0 came"])
    name, folder = chief["dataset"], chief["data_dir"]
    prepare = f"python -m jobkit prepare --dataset {name} on a login node, on a file system of "
    prepare += "all nodes, and the same --data-dir (or JOBKIT_DATA_DIR) for the job"
    found = Finding(
        "data", f"{name}: {chief.get('cache')} whole on {many(len(by_host(facts)), 'node')}"
    )
    if chief["data_fault"]:
        found.fault(where([chief]), chief["data_fault"], prepare)
    elif not chief["cached"]:
        found.text = f"{name}: not prepared yet; rank 0 makes it in {folder}, seen by all nodes"
        blind = [r for r in results if folder in r["hidden"]]
        if chief["data_dir_fault"]:
            text = f"{folder} cannot be written: {chief['data_dir_fault']}"
            found.fault(where([chief]), text, prepare)
        elif blind:
            text = f"{folder} is not the one of rank 0, which will prepare {name} there"
            found.fault(where(blind), text, prepare)
    for text, own in grouped(results, lambda r: r["cache_fault"]).items():
        found.fault(where(own), f"{chief['cache']} cannot be used: {text}", prepare)
    return found


def all_reduce(facts: Sequence[Facts], results: Sequence[Facts]) -> Finding:
    """The sum over all ranks is right, on every rank."""
    size = len(facts)
    total = size * (size + 1) / 2
    found = Finding("all_reduce")
    fix = "let the nodes reach each other on all ports, and name the interface that they share "
    fix += "in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"
    for text, own in grouped(results, lambda r: r.get("group_fault")).items():
        found.fault(where(own), text, fix)
    silent = {f["rank"] for f in facts} - {r["rank"] for r in results}
    if silent:
        lost = [f for f in facts if f["rank"] in silent]
        found.fault(where(lost), "ended or hung during the all_reduce", fix)
    for said, own in grouped(results, lambda r: r.get("sum")).items():
        if said != total:
            found.fault(where(own), f"the sum is {said}, and {total} is right", fix)
    if not found.faults:
        first = results[0]
        found.text = f"right over {many(size, 'rank')} with {first['backend']}; one number takes "
        found.text += f"{first['latency_us']:.0f} us"
    return found


def bandwidth(facts: Sequence[Facts], results: Sequence[Facts]) -> Finding:
    """The speed of an all_reduce between the nodes: a number to know, a fault when absurd."""
    one = next((r for r in results if "bus_mb_per_s" in r), None)
    if one is None:
        return Finding("bandwidth", "" if len(facts) > 1 else "one rank: nothing to measure")
    nodes = len(by_host(facts)) > 1
    speed, members = one["bus_mb_per_s"], one["members"]
    between = f"between {members} {'nodes' if nodes else 'ranks of a node'}"
    text = f"{speed / 1e3:.3g} GB/s on the bus {between} (all_reduce of {one['mib']:g} MiB)"
    found = Finding("bandwidth", text)
    if speed < _ABSURD_MB_PER_S:
        fix = "name the fast interface in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and show the "
        found.fault(where(results), text, fix + "site this line")
    elif speed < _SLOW_MB_PER_S and nodes:
        found.notes.append(f"bandwidth: {speed:.0f} MB/s is slow for a cluster: which network?")
    return found


@dataclass(frozen=True)
class Report:
    """What a preflight has to say."""

    facts: Sequence[Facts]
    findings: Sequence[Finding]
    took_s: float

    @property
    def code(self) -> int:
        """The exit code of the step."""
        return Exit.PREFLIGHT if any(f.faults for f in self.findings) else Exit.OK

    def lines(self) -> list[str]:
        """The lines for people: one a check, and one a fault."""
        lines = []
        for finding in self.findings:
            lines += [f"[preflight] FAULT {fault}" for fault in finding.faults]
            if finding.text and not finding.faults:
                lines.append(f"[preflight] ok {finding.check}: {finding.text}")
            lines += [f"[preflight] note {note}" for note in finding.notes]
        count = sum(len(f.faults) for f in self.findings)
        end = f"{count} fault{'s' * (count > 1)}" if count else "everything is as it should be"
        return [*lines, f"[preflight] {end} ({self.took_s:.1f} s)"]

    def to_json(self) -> dict[str, Any]:
        """The same for programs, with the facts themselves."""
        return {
            "ok": self.code == Exit.OK,
            "exit_code": int(self.code),
            "took_s": self.took_s,
            "faults": [asdict(fault) for f in self.findings for fault in f.faults],
            "checks": [
                {"check": f.check, "ok": not f.faults, "measured": f.text, "notes": f.notes}
                for f in self.findings
            ],
            "ranks": list(self.facts),
        }
