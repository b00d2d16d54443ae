"""One process of a preflight: it reports its facts, and takes part in the joint checks.

Rank 0 is the coordinator as well, which gathers the facts of all, judges and reports them.
"""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobkit.checks.preflight.facts import addresses_of, find_facts, who
from jobkit.checks.preflight.group import together
from jobkit.checks.preflight.judge import (
    HUNG_NODE,
    NEEDED_FOR_A_GROUP,
    CheckResult,
    judge_facts,
    judge_together,
)
from jobkit.checks.preflight.rendezvous import (
    FACTS,
    RESULTS,
    Connection,
    Rendezvous,
    Unreachable,
    connect,
    connect_or_listen,
    is_here,
    listen,
)
from jobkit.errors import Exit
from jobkit.payload.place import default_port, read_rank_env
from jobkit.spec.runspec import RunSpec

_REACH_MASTER = (
    "check that every node resolves this name to rank 0's node (MASTER_ADDR, or the site profile's "
    "interface suffix), that no firewall is in between, and that rank 0 has started; or set "
    "another MASTER_PORT"
)
# What tells one start of the ranks from another. run.sh makes a secret for each.
_IDENTITY = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    "JOBKIT_PREFLIGHT_SECRET",
)


class PreflightRank:
    """One process of a preflight. Raises UsageError for the launcher's variables."""

    def __init__(self, run_dir: Path, spec: RunSpec, timeout_s: float) -> None:
        """timeout_s: for the ranks to connect and to report what each finds out alone."""
        self._run_dir, self._spec, self._timeout_s = run_dir, spec, timeout_s
        self._start = time.monotonic()
        self._group_s = max(timeout_s / 2, 5.0)  # for the group, and each of its collectives
        self._together_s = self._group_s + 12  # for all that the ranks do together
        self._place = read_rank_env()
        place = who(self._place, os.environ)
        self._name = {"host": place["host"], "rank": place["rank"]}
        self._expected = place["tasks"] or place["world_size"]
        self._token = f"alone {os.getpid()}"
        if self._place.master_port:
            words = [os.environ.get(name, "-") for name in _IDENTITY]
            self._token = " ".join([*words, str(self._place.master_port)])

    def check(self) -> int:
        """Check with the other ranks; return the exit code."""
        # Should all else hang, in a driver or a file system, the kernel ends the process.
        signal.alarm(int(self._timeout_s + self._together_s + 3))
        place, port = self._place, self._place.master_port
        self._ips = addresses_of(place.master_addr)
        # The master's own port must be free for torch's store.
        beside = default_port(port, 1) if port else 0
        try:
            if not self._ips:
                raise Unreachable("the name does not resolve to an address")
            listens = place.rank == 0 and is_here(self._ips)
            met = connect_or_listen(self._connect, beside, listens, self._timeout_s)
            if isinstance(met, Connection):
                return self._take_part(met)
            here = met.getsockname()[1]
            take_part = threading.Thread(
                target=lambda: self._take_part(self._connect(here)), daemon=True
            )
            take_part.start()
            code = self._coordinate(Rendezvous(met, self._token))
            take_part.join(1)
            return code
        except Unreachable as error:
            return self._alone(str(error))
        finally:
            signal.alarm(0)

    def _connect(self, port: int) -> Connection:
        return connect(self._ips, port, self._token, self._name)

    def _alone(self, why: str) -> int:
        """Report from this process alone that the others cannot be reached."""
        result = CheckResult("master")
        why = f"{self._place.master_addr} cannot be reached ({why})"
        result.fault([self._name], why, _REACH_MASTER)
        return self._show([result])

    def _show(self, results: Sequence[CheckResult]) -> int:
        """Print the lines of all checks, and return the exit code."""
        faults = sum(len(result.faults) for result in results)
        end = f"{faults} fault{'s' * (faults > 1)}" if faults else "all checks passed"
        lines = [f"[preflight] {line}" for result in results for line in result.lines()]
        took = f"({time.monotonic() - self._start:.1f} s)"
        print(*lines, f"[preflight] {end} {took}", sep="\n", flush=True)
        return Exit.PREFLIGHT if faults else Exit.OK

    def _take_part(self, connection: Connection) -> int:
        """Send the facts, do the coordinator's task, send the results, wait for the end."""
        try:
            facts = find_facts(self._place, self._spec, self._run_dir, os.environ)
            connection.send({"stage": FACTS, **facts})
            task = connection.receive(self._timeout_s + self._together_s)
            # The run's folder may be another one on another node.
            results: dict[str, Any] = {"hidden": not (self._run_dir / task["probe"]).exists()}
            if task["group"]:
                results |= together(self._place, self._spec.device, self._group_s)
            connection.send({"stage": RESULTS, **self._name, **results})
            connection.receive(self._together_s)
        except (OSError, ValueError) as error:
            return self._alone(f"the coordinator ended early: {error}")
        connection.close()
        return Exit.OK

    def _coordinate(self, meeting: Rendezvous) -> int:
        """Gather what the ranks found out alone, then what they did together; report both."""
        for number in (signal.SIGTERM, signal.SIGINT):  # srun ends all ranks when one fails
            signal.signal(number, lambda *_: setattr(meeting, "hurried", True))
        left = self._start + self._timeout_s - time.monotonic()
        facts = meeting.gather(FACTS, self._expected, left)
        if not facts:
            result = CheckResult("presence")
            result.fault(meeting.connected or [self._name], "no rank has reported", HUNG_NODE)
            return self._show([result])
        facts.sort(key=lambda f: (f["rank"], f["host"], f["pid"]))
        waited_s = time.monotonic() - self._start
        fault = self._port_fault()
        checks = judge_facts(facts, self._expected, waited_s, fault, meeting.connected)
        with contextlib.ExitStack() as stack:
            probe = ""
            with contextlib.suppress(OSError):  # a fault of its own tells why
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(prefix=".preflight-", dir=self._run_dir)
                )
                probe = Path(file.name).name
            task = {
                "probe": probe,
                "group": not any(c.faults for c in checks if c.check in NEEDED_FOR_A_GROUP),
            }
            meeting.answer(task)
            results = meeting.gather(RESULTS, len(facts), self._together_s)
        results.sort(key=lambda r: r["rank"])
        code = self._show([*checks, *judge_together(facts, results, task)])
        meeting.answer({"end": True})
        meeting.finish(1)
        return code

    def _port_fault(self) -> str:
        """Return why torch's store could not listen on the master's port; torchrun's agent does."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            if self._place.master_port and not agent:
                listen(self._place.master_port).close()
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""
