"""One process of a preflight, and the one of them that keeps the desk and speaks for all."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobkit.checks.preflight import facts as find
from jobkit.checks.preflight.group import together
from jobkit.checks.preflight.judge import Finding
from jobkit.checks.preflight.rendezvous import Desk, Line, Lost, clock_offset, is_here, listen, meet
from jobkit.checks.preflight.report import (
    NEEDED_FOR_A_GROUP,
    Circumstances,
    Report,
    judge_facts,
    judge_together,
)
from jobkit.checks.preflight.request import Wish
from jobkit.errors import Exit
from jobkit.payload.slurm_env import default_port, ephemeral_ports


class Rank:
    """One process of a preflight."""

    def __init__(self, wish: Wish) -> None:
        self.wish, self.start = wish, time.monotonic()
        self.place, fault = find.claimed_place(os.environ)
        self.who = find.who(self.place, fault, os.environ)
        self.name = {"host": self.who["host"], "rank": self.who["rank"]}

    def check(self) -> int:
        """Meet the others, say what is so here, and work with them; return the exit code."""
        try:
            line, desk = self._meet()
        except Lost as lost:
            return self._alone(str(lost))
        if desk is None:
            return self._take_part(line)
        with _ended_early(desk):
            part = threading.Thread(target=self._take_part, args=(line,), daemon=True)
            part.start()
            code = Chair(self, desk).preside()
            part.join(1)
            desk.close(1)
        return code

    def _meet(self) -> tuple[Line, Desk | None]:
        place = self.place
        ips = find.addresses_of(place.master_addr)
        if not ips:
            raise Lost("the name does not resolve to an address")
        ports = [0]
        if place.master_port:  # others of the job's own: that one must be free for torch's store
            ports = [default_port(place.master_port, k, ephemeral_ports()) for k in range(1, 5)]
        return meet(
            place.master_addr,
            ports,
            {"hello": self._token(), **self.name},
            here=is_here(ips),
            first=self.who["rank"] == 0,
            timeout_s=self.wish.timeout_s,
        )

    def _token(self) -> str:
        """The same for all processes of this start, and for no other's."""
        environ, place = os.environ, self.place
        if not place.master_port:
            return f"alone {os.getpid()}"
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
        return " ".join([*(environ.get(name, "-") for name in names), str(place.master_port)])

    def _alone(self, why: str) -> int:
        """Say by oneself that the others cannot be reached."""
        found = Finding("master")
        found.fault(
            f"rank {self.name['rank']} on {self.name['host']}",
            f"{self.place.master_addr} cannot be reached ({why})",
            "see that this name leads every node to rank 0's (MASTER_ADDR, or the site profile's "
            "interface suffix), that no firewall stands between, and that rank 0 has started",
        )
        show(Report([], [found], time.monotonic() - self.start), self.wish.as_json)
        return Exit.PREFLIGHT

    # --- what every process does -----------------------------------------------------------

    def _take_part(self, line: Line) -> int:
        """Send the facts, do what the desk says, send what came of it, hear the end."""
        try:
            ahead, error = clock_offset(line)
            facts = {**self.facts(), "clock_ahead_s": ahead, "clock_error_s": error}
            line.send({"stage": "facts", **facts})
            told = line.receive(self.wish.timeout_s + self.wish.together_s)
            line.send({"stage": "together", **self.name, **self._together(told)})
            line.receive(self.wish.together_s)
        except (OSError, ValueError) as error:
            return self._alone(f"the check there ended early: {error}")
        line.close()
        return Exit.OK

    def facts(self) -> find.Facts:
        """All that this process can say by itself."""
        wish, place = self.wish, self.place
        found = {
            **self.who,
            **find.gpu(place, wish.spec.device),
            **find.cores(place, os.environ),
            **find.versions(place),
            **find.names(place, os.environ),
            "log_dir": str(wish.run_dir),
            "log_fault": find.write_fault(wish.run_dir),
        }
        if self.who["rank"] == 0:  # which prepares the data in a training
            spec = wish.spec
            sizes = (spec.train_samples, spec.test_samples)
            found |= {"dataset": spec.dataset, "data_dir": str(wish.data_dir), "cached": False}
            found |= find.source(spec.dataset, wish.data_dir, sizes)
            found["data_dir_fault"] = "" if found["cached"] else find.write_fault(wish.data_dir)
        return found

    def _together(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Look for the desk's file in the shared folders, and try the group."""
        wish = self.wish
        # Each rank writes to its own run folder, by whatever path, and reads rank 0's data.
        places = {"log_dir": str(wish.run_dir), "data_dir": told["data_dir"]}
        wanted = {told[key]: place for key, place in places.items() if told[key]}
        cache = told["cache"] if self.place.local_rank == 0 else None
        found = find.look_at(wanted, told["probe"], cache)
        if told["group"]:
            found |= together(self.place, wish.spec.device, wish.group_s)
        return found


class Chair:
    """The process at the desk: it gathers, judges, and reports."""

    def __init__(self, rank: Rank, desk: Desk) -> None:
        self._wish, self._place, self._start = rank.wish, rank.place, rank.start
        self._expected = rank.who["tasks"] or rank.place.world_size
        self._desk = desk

    def preside(self) -> int:
        """Judge what the ranks say of themselves, then what they do together; report both."""
        left = self._start + self._wish.timeout_s - time.monotonic()
        facts = self._desk.gather("facts", self._expected, left)
        facts.sort(key=lambda f: (f["rank"], f["host"], f["pid"]))
        if not facts:
            return Exit.PREFLIGHT  # its own failed, and has said so
        around = Circumstances(
            self._expected, time.monotonic() - self._start, self._port_fault(), self._desk.heard
        )
        findings = judge_facts(facts, around)
        sound = not any(f.faults for f in findings if f.check in NEEDED_FOR_A_GROUP)
        with self._probe(facts) as told:
            self._desk.answer({**told, "group": sound})
            results = self._desk.gather("together", len(facts), self._wish.together_s)
        results.sort(key=lambda r: r["rank"])
        findings += judge_together(facts, results, {**told, "group": sound})
        report = Report(facts, findings, time.monotonic() - self._start)
        show(report, self._wish.as_json)
        self._desk.answer({"end": True})
        return report.code

    def _port_fault(self) -> str:
        """Why torch's store could not listen on the master's port; torchrun's agent does so."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            if self._place.master_port and not agent:
                listen(self._place.master_port).close()
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""

    @contextlib.contextmanager
    def _probe(self, facts: list[find.Facts]) -> Iterator[dict[str, Any]]:
        """Leave a file in the folders that nodes share, while the others look for it."""
        chief = next((f for f in facts if "dataset" in f), {})
        later = not chief.get("cached", True) and not chief["data_fault"]
        told: dict[str, Any] = {
            "probe": f".preflight-{os.urandom(8).hex()}",
            "log_dir": str(self._wish.run_dir),
            "data_dir": chief["data_dir"] if later else "",
            "cache": chief.get("cache") if chief.get("cached") else None,
        }
        files = []
        try:
            for key in ("log_dir", "data_dir"):
                if not told[key]:
                    continue
                file = Path(told[key]) / told["probe"]
                try:
                    file.write_text("preflight")
                    files.append(file)
                except OSError:  # then nobody need look; a fault of its own tells why
                    told[key] = ""
            yield told
        finally:
            for file in files:
                file.unlink(missing_ok=True)


def show(report: Report, as_json: bool) -> None:
    """Print the report, for people or as one object."""
    print(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()), flush=True)


@contextlib.contextmanager
def _ended_early(desk: Desk) -> Iterator[None]:
    """A rank that fails has srun end the others: then report at once what is known by now."""
    before = {
        number: signal.signal(number, lambda *_: desk.hurry())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
