"""The process of a preflight that gathers the facts of all ranks, judges them, and reports."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobkit.checks.preflight.facts import Facts
from jobkit.checks.preflight.rendezvous import Rendezvous, listen
from jobkit.checks.preflight.report import (
    NEEDED_FOR_A_GROUP,
    Circumstances,
    Report,
    judge_facts,
    judge_together,
)
from jobkit.checks.preflight.request import Request
from jobkit.errors import Exit
from jobkit.payload.place import RankEnv


class Coordinator:
    """Gathers what the ranks found out alone, then what they did together; reports both."""

    def __init__(self, request: Request, place: RankEnv, expected: int, token: str) -> None:
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
        around = Circumstances(
            self._expected, time.monotonic() - start, self._port_fault(), rendezvous.connected
        )
        findings = judge_facts(facts, around)
        group = not any(f.faults for f in findings if f.check in NEEDED_FOR_A_GROUP)
        with _probe(facts, request.run_dir) as told:
            task = {**told, "group": group}
            rendezvous.answer(task)
            results = await rendezvous.gather("results", len(facts), request.together_s)
        results.sort(key=lambda r: r["rank"])
        report = Report(
            facts, findings + judge_together(facts, results, task), time.monotonic() - start
        )
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
    told: dict[str, Any] = {
        "probe": f".preflight-{os.urandom(8).hex()}",
        "log_dir": str(run_dir),
        "data_dir": first["data_dir"] if later else "",
        "cache": first.get("cache") if first.get("cached") else None,
    }
    files = []
    try:
        for key in ("log_dir", "data_dir"):
            if not told[key]:
                continue
            file = Path(told[key]) / told["probe"]
            try:
                with file.open("x") as new:
                    files.append(file)
                    new.write("preflight")
            except OSError:  # then no rank need look; a fault of its own tells why
                told[key] = ""
        yield told
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def show(report: Report, as_json: bool) -> None:
    """Print the report, for people or as one object."""
    print(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()), flush=True)
