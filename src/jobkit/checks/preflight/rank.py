"""One process of a preflight: it reports its facts, and takes part in the joint checks.

One of them is the coordinator as well, which gathers the facts of all, judges and reports them.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.checks.preflight import facts as find
from jobkit.checks.preflight.group import together
from jobkit.checks.preflight.judge import NEEDED_FOR_A_GROUP, judge_facts, judge_together
from jobkit.checks.preflight.rendezvous import (
    Connection,
    Rendezvous,
    Unreachable,
    connect,
    is_here,
    listen,
    listener_or_connection,
)
from jobkit.checks.preflight.report import CheckResult, Facts, Report
from jobkit.checks.requests import PreflightRequest
from jobkit.errors import Exit
from jobkit.payload.place import RankEnv, default_port, ephemeral_ports

_REACH_MASTER = (
    "check that every node resolves this name to rank 0's node (MASTER_ADDR, or the site profile's "
    "interface suffix), that no firewall is in between, and that rank 0 has started"
)
# What tells one start of the ranks from another. run.sh makes a secret for each.
_IDENTITY = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    "JOBKIT_PREFLIGHT_SECRET",
)


class PreflightRank:
    """One process of a preflight; one of them is the coordinator as well."""

    def __init__(self, request: PreflightRequest) -> None:
        self._request, self._start = request, time.monotonic()
        self._place, fault = find.claimed_place(os.environ)
        self._who = find.who(self._place, fault, os.environ)
        self._name = {"host": self._who["host"], "rank": self._who["rank"]}

    def check(self) -> int:
        """Check with the other ranks; return the exit code."""
        try:
            met = self._meet()
        except Unreachable as error:
            return self._alone(str(error))
        if isinstance(met, Connection):
            return self._take_part(met)
        part = threading.Thread(target=self._join_own, args=(met.getsockname()[1],), daemon=True)
        part.start()
        expected = self._who["tasks"] or self._place.world_size
        coordinator = Coordinator(self._request, self._place, expected, self._token())
        code = asyncio.run(coordinator.run(met, self._start))
        part.join(1)
        return code

    def _meet(self) -> Connection | socket.socket:
        place = self._place
        ips = find.addresses_of(place.master_addr)
        if not ips:
            raise Unreachable("the name does not resolve to an address")
        ports = [0]
        if place.master_port:  # others of the job's own: that one must be free for torch's store
            ports = [default_port(place.master_port, k, ephemeral_ports()) for k in range(1, 5)]
        return listener_or_connection(
            ports,
            self._join,
            here=is_here(ips),
            first=self._who["rank"] == 0,
            timeout_s=self._request.timeout_s,
        )

    def _join(self, port: int) -> Connection:
        return connect(self._place.master_addr, port, self._token(), self._name)

    def _join_own(self, port: int) -> None:
        """Take part in the rendezvous that this process serves."""
        try:
            self._take_part(self._join(port))
        except Unreachable as error:
            self._alone(str(error))

    def _token(self) -> str:
        """Return what all processes of this start share, and those of no other."""
        if not self._place.master_port:
            return f"alone {os.getpid()}"
        words = [os.environ.get(name, "-") for name in _IDENTITY]
        return " ".join([*words, str(self._place.master_port)])

    def _alone(self, why: str) -> int:
        """Report from this process alone that the others cannot be reached."""
        result = CheckResult("master")
        result.fault(
            f"rank {self._name['rank']} on {self._name['host']}",
            f"{self._place.master_addr} cannot be reached ({why})",
            _REACH_MASTER,
        )
        show(Report([], [result], time.monotonic() - self._start), self._request.as_json)
        return Exit.PREFLIGHT

    def _take_part(self, connection: Connection) -> int:
        """Send the facts, do the coordinator's task, send the results, wait for the end."""
        together_s = self._request.together_s
        try:
            connection.send({"stage": "facts", **self._facts()})
            task = connection.receive(self._request.timeout_s + together_s)
            connection.send({"stage": "results", **self._name, **self._results(task)})
            connection.receive(together_s)
        except (OSError, ValueError) as error:
            return self._alone(f"the coordinator ended early: {error}")
        connection.close()
        return Exit.OK

    def _facts(self) -> find.Facts:
        """Return all that this process can find out alone."""
        request, place = self._request, self._place
        facts = {
            **self._who,
            **find.gpu(place, request.spec.device),
            **find.cores(place, os.environ),
            **find.limits(),
            **find.versions(place),
            **find.names(place, os.environ),
            "log_dir": str(request.run_dir),
            "log_fault": find.write_fault(request.run_dir),
        }
        if self._who["rank"] == 0:  # which prepares the data in a training
            spec = request.spec
            sizes = (spec.train_samples, spec.test_samples)
            facts |= {"dataset": spec.dataset, "data_dir": str(request.data_dir), "cached": False}
            facts |= find.source(spec.dataset, request.data_dir, sizes)
            facts["data_dir_fault"] = "" if facts["cached"] else find.write_fault(request.data_dir)
        return facts

    def _results(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Look for the coordinator's file in the shared folders, and try the process group."""
        request = self._request
        # Each rank writes to its own run folder, by whatever path, and reads rank 0's data.
        places = {"log_dir": str(request.run_dir), "data_dir": task["data_dir"]}
        wanted = {task[key]: place for key, place in places.items() if task[key]}
        cache = task["cache"] if self._place.local_rank == 0 else None
        seen = find.look_at(wanted, task["probe"], cache)
        if task["group"]:
            seen |= together(self._place, request.spec.device, request.group_s)
        return seen


class Coordinator:
    """Gathers what the ranks found out alone, then what they did together; reports both."""

    def __init__(
        self, request: PreflightRequest, place: RankEnv, expected: int, token: str
    ) -> None:
        self._request, self._place, self._expected = request, place, expected
        self._rendezvous = Rendezvous(token)

    async def run(self, listener: socket.socket, start: float) -> int:
        """Return the exit code; start: when this process began, by the monotonic clock."""
        request, rendezvous = self._request, self._rendezvous
        await rendezvous.serve(listener)
        for number in (signal.SIGTERM, signal.SIGINT):  # srun ends all ranks when one fails
            asyncio.get_running_loop().add_signal_handler(number, rendezvous.hurry)
        left = start + request.timeout_s - time.monotonic()
        facts = await rendezvous.gather("facts", self._expected, left)
        facts.sort(key=lambda f: (f["rank"], f["host"], f["pid"]))
        if not facts:
            if rendezvous.hurried:
                print("[preflight] stopped by a signal before any rank had reported", flush=True)
            return Exit.PREFLIGHT  # else this process' own failed, and has said so
        waited_s = time.monotonic() - start
        checks = judge_facts(
            facts, self._expected, waited_s, self._port_fault(), rendezvous.connected
        )
        group = not any(c.faults for c in checks if c.check in NEEDED_FOR_A_GROUP)
        with _probe(facts, request.run_dir) as probe:
            task = {**probe, "group": group}
            rendezvous.answer(task)
            results = await rendezvous.gather("results", len(facts), request.together_s)
        results.sort(key=lambda r: r["rank"])
        checks += judge_together(facts, results, task)
        report = Report(facts, checks, time.monotonic() - start)
        show(report, request.as_json)
        rendezvous.answer({"end": True})
        await rendezvous.finish(1)
        return report.code

    def _port_fault(self) -> str:
        """Return why torch's store could not listen on the master's port; torchrun's agent does."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            if self._place.master_port and not agent:
                listen(self._place.master_port).close()
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""


@contextlib.contextmanager
def _probe(facts: Sequence[Facts], run_dir: Path) -> Iterator[dict[str, Any]]:
    """Leave a file in the folders that nodes share, while the ranks look for it."""
    first = next((f for f in facts if "dataset" in f), {})
    later = not first.get("cached", True) and not first["data_fault"]
    probe: dict[str, Any] = {
        "probe": f".preflight-{os.urandom(8).hex()}",
        "log_dir": str(run_dir),
        "data_dir": first["data_dir"] if later else "",
        "cache": first.get("cache") if first.get("cached") else None,
    }
    files = []
    try:
        for key in ("log_dir", "data_dir"):
            if not probe[key]:
                continue
            file = Path(probe[key]) / probe["probe"]
            try:
                with file.open("x") as new:
                    files.append(file)
                    new.write("preflight")
            except OSError:  # then no rank need look; a fault of its own tells why
                probe[key] = ""
        yield probe
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def show(report: Report, as_json: bool) -> None:
    """Print the report, for people or as one object."""
    print(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()), flush=True)
