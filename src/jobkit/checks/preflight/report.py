"""The checks of what the ranks of a preflight did together, and the report of all checks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jobkit.checks.preflight import judge, notes, transports
from jobkit.checks.preflight.finding import CheckResult, Facts, by_host, grouped, many, where
from jobkit.errors import Exit

# Where one of these found a fault, a group would only hang, or fail for a reason already reported.
NEEDED_FOR_A_GROUP = ("presence", "ranks", "world", "gpus", "master", "port")
_ABSURD_MB_PER_S = 10.0  # less than Fast Ethernet: training would only wait
_FREE_PORT = (
    "end the program that holds it (ss -ltnp shows it), or set another MASTER_PORT; unset, the "
    "port comes from the job's id"
)
_PREPARE = (
    "python -m jobkit prepare --dataset {} on a login node, on a file system of all nodes, and the "
    "same --data-dir (or JOBKIT_DATA_DIR) for the job"
)
_REACH = (
    "let the nodes reach each other on all ports, and set NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME to the interface that they share; NCCL_DEBUG=INFO says more"
)
_FAST_INTERFACE = (
    "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the fast interface, and show the site this "
    "line"
)


@dataclass(frozen=True)
class Circumstances:
    """What the coordinator knows besides the facts of the ranks."""

    expected: int  # processes that were started
    waited_s: float
    port_fault: str  # why the master's port cannot be used
    connected: Sequence[Facts] = ()  # rank and host of all, those included that then hung


def judge_facts(facts: Sequence[Facts], around: Circumstances) -> list[CheckResult]:
    """Return all checks of what each rank found out alone; the first facts are the first rank's."""
    return [
        judge.presence(facts, around.expected, around.waited_s, around.connected),
        judge.places(facts),
        judge.world(facts),
        judge.gpus(facts),
        notes.gpu_notes(facts),
        notes.limit_notes(facts),
        judge.cores(facts),
        judge.names(facts),
        port(facts[0], around.port_fault),
        judge.versions(facts),
        judge.writable(facts),
    ]


def judge_together(
    facts: Sequence[Facts], results: Sequence[Facts], task: Mapping[str, Any]
) -> list[CheckResult]:
    """Return all checks of what the ranks did together, given the coordinator's task."""
    found = [shared(facts, results, task["log_dir"]), data(facts, results)]
    if not task["group"]:
        text = "not checked, because of the faults above"
        return [*found, CheckResult("all_reduce", notes=[f"all_reduce, bandwidth: {text}"])]
    ways = transports.transports(facts, results)
    return [*found, all_reduce(facts, results), ways, bandwidth(facts, results)]


def port(chief: Facts, fault: str) -> CheckResult:
    """Check that the master's port is free, for torch's store to listen on."""
    port = chief["master_port"]
    found = CheckResult("port", f"{port} is free" if port else "none needed: one process")
    if fault:
        at = f"{chief['host']} ({chief['master_addr']})"
        found.fault(at, f"port {chief['master_port']} cannot be used: {fault}", _FREE_PORT)
    return found


def shared(facts: Sequence[Facts], results: Sequence[Facts], folder: str) -> CheckResult:
    """Check that a file that one node wrote to the run's folder is there on every node."""
    if not folder:
        return CheckResult("shared", notes=["shared: not checked, as no file could be written"])
    found = CheckResult(
        "shared", f"{folder} is the same folder on {many(len(by_host(facts)), 'node')}"
    )
    blind = [r for r in results if folder in r["hidden"]]
    if blind:
        text = f"{folder} is another folder here: a file that the master's node wrote is not there"
        found.fault(where(blind), text, judge.SHARED_FOLDER)
    return found


def data(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """Check that the cache is complete on every node, or that rank 0 can make it for all."""
    chief = next((f for f in facts if "dataset" in f), None)
    if chief is None:
        return CheckResult("data", notes=["data: not checked: rank 0 did not report"])
    name, folder = chief["dataset"], chief["data_dir"]
    prepare = _PREPARE.format(name)
    found = CheckResult(
        "data", f"{name}: {chief.get('cache')} complete on {many(len(by_host(facts)), 'node')}"
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


def all_reduce(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """Check that the sum over all ranks is right, on every rank."""
    size = len(facts)
    total = size * (size + 1) / 2
    found = CheckResult("all_reduce")
    for text, own in grouped(results, lambda r: r.get("group_fault")).items():
        found.fault(where(own), text, _REACH)
    silent = {f["rank"] for f in facts} - {r["rank"] for r in results}
    if silent:
        lost = [f for f in facts if f["rank"] in silent]
        found.fault(where(lost), "ended or hung during the all_reduce", _REACH)
    for said, own in grouped(results, lambda r: r.get("sum")).items():
        if said != total:
            found.fault(where(own), f"the sum is {said}, and {total} is right", _REACH)
    if not found.faults:
        first = results[0]
        us = f"{first['latency_us']:.0f} us"
        found.text = f"right over {many(size, 'rank')} with {first['backend']}; latency {us}"
    return found


def bandwidth(facts: Sequence[Facts], results: Sequence[Facts]) -> CheckResult:
    """Return the bandwidth of an all_reduce between the nodes; a fault where it is absurd.

    Only between nodes: inside a node there is no interface that could be the wrong one.
    """
    one = next((r for r in results if "bus_mb_per_s" in r), None)
    if one is None:
        return CheckResult("bandwidth", "" if len(facts) > 1 else "one rank: nothing to measure")
    nodes = len(by_host(facts)) > 1
    speed, members = one["bus_mb_per_s"], one["members"]
    between = f"between {members} {'nodes' if nodes else 'ranks of a node'}"
    text = f"busbw {speed / 1e3:.3g} GB/s {between} (all_reduce of {one['mib']:g} MiB)"
    found = CheckResult("bandwidth", text)
    least = transports.least_mb_per_s(facts, one.get("backend", "")) if nodes else 0.0
    if speed < _ABSURD_MB_PER_S and nodes:
        found.fault(where(results), text, _FAST_INTERFACE)
    elif speed < least:
        found.notes.append(
            f"bandwidth: {speed:.0f} MB/s is slow for {one['backend']} on this network, of which "
            f"{least:.0f} are expected at least: check the interface"
        )
    return found


@dataclass(frozen=True)
class Report:
    """The result of a preflight."""

    facts: Sequence[Facts]
    findings: Sequence[CheckResult]
    took_s: float

    @property
    def code(self) -> int:
        """Return the exit code of the step."""
        return Exit.PREFLIGHT if any(f.faults for f in self.findings) else Exit.OK

    def lines(self) -> list[str]:
        """Return the lines for people: one per check, and one per fault."""
        lines = []
        for finding in self.findings:
            lines += [f"[preflight] FAULT {fault}" for fault in finding.faults]
            if finding.text and not finding.faults:
                lines.append(f"[preflight] ok {finding.check}: {finding.text}")
            lines += [f"[preflight] note {note}" for note in finding.notes]
        count = sum(len(f.faults) for f in self.findings)
        end = many(count, "fault") if count else "all checks passed"
        return [*lines, f"[preflight] {end} ({self.took_s:.1f} s)"]

    def to_json(self) -> dict[str, Any]:
        """Return the same for programs, with the facts themselves."""
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
