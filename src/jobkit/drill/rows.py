"""The runs of a drill: the reference, then one for each fault, concurrently where that is safe."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from jobkit.drill.fault_run import FaultRun, Halted
from jobkit.drill.faults import FaultCase
from jobkit.drill.place import LocalPlace
from jobkit.drill.program import Command, Training
from jobkit.drill.row import Row
from jobkit.drill.slurm import SlurmPlace
from jobkit.errors import UsageError
from jobkit.paths import RunPaths, StudyPaths

if TYPE_CHECKING:
    from rich.console import Console

REFERENCE = "reference"
AT_ONCE = 3  # runs on Slurm; most of their time they wait


def check_any(whys: Mapping[str, str]) -> None:
    """Raise UsageError where no fault can be injected. whys: by fault why not, or empty."""
    if all(whys.values()):
        said = "; ".join(f"{name}: {why}" for name, why in whys.items())
        raise UsageError(f"no fault can be injected here: {said}")


def impossible(place: LocalPlace | SlurmPlace, fault: FaultCase) -> str:
    """Return why a fault cannot be injected at a place; empty if it can."""
    if place.name not in fault.where:
        return "it needs Slurm"
    if fault.needs == "urgent" and not (isinstance(place, SlurmPlace) and place.urgent):
        return "no partition whose jobs preempt others: name one with --urgent-partition"
    if fault.needs == "processes" and not place.sees_processes:
        return "it signals one rank on its node: needs --local or --minicluster"
    return ""


class Drill:
    """The runs of a drill."""

    def __init__(
        self,
        place: LocalPlace | SlurmPlace,
        study: StudyPaths,
        program: Training | Command,
        patience_s: float,
        console: "Console",
        halted: threading.Event,
    ) -> None:
        self.place, self.study, self.console = place, study, console
        self.program, self.patience_s, self.halted = program, patience_s, halted
        self.token = secrets.token_hex(6)

    def check(self, faults: Sequence[FaultCase]) -> dict[str, str]:
        """Why each fault cannot be injected here, "" if it can; UsageError where none can."""
        own = self.program.impossible
        whys = {fault.name: own(fault) or impossible(self.place, fault) for fault in faults}
        check_any(whys)
        return whys

    def run(self, faults: Sequence[FaultCase]) -> list[Row]:
        """Run the reference, then a run for each fault; return their rows, in order."""
        whys = self.check(faults)
        self.console.print(f"{REFERENCE}: the run without a fault, as the reference")
        reference = self._reference()
        todo = []
        for fault in faults:
            try:
                if not whys[fault.name]:
                    found = self.program.limited(fault, reference.paths, reference.started.took_s)
                    todo.append(found)
            except UsageError as error:
                whys[fault.name] = str(error)
        check_any(whys)
        # Off Slurm the ranks of two runs would share the cores.
        with ThreadPoolExecutor(AT_ONCE if self.place.name == "slurm" else 1) as pool:
            futures = {fault.name: pool.submit(self._one, fault) for fault in todo}
        rows = [
            Row(fault=fault.name, note=f"not possible here: {whys[fault.name]}")
            if whys[fault.name]
            else futures[fault.name].result()
            for fault in faults
        ]
        return self.program.compared(rows, self.study.folder / REFERENCE)

    def _reference(self) -> FaultRun:
        plain = FaultCase(name=REFERENCE, text="", first=("ok",), kind="")
        reference = self._fault_run(plain)
        row = reference.run_reference()
        if row.final_status != "ok":
            why = f" ({row.evidence})" if row.evidence else ""
            raise UsageError(f"the run without a fault failed{why}: see {reference.paths.log}")
        self.program.check_reference(reference.paths, reference.started.took_s)
        return reference

    def _one(self, fault: FaultCase) -> Row:
        if self.halted.is_set():
            return Row(fault=fault.name, note="not injected: the drill was interrupted")
        try:
            row = self._fault_run(fault).run()
        except Halted:
            return Row(fault=fault.name, note="the drill was interrupted")
        self.console.print(
            f"{fault.name}: {row.first_status}, then {row.final_status}"
            + (f" ({row.note})" if row.note else ""),
            soft_wrap=True,
        )
        return row

    def _fault_run(self, fault: FaultCase) -> FaultRun:
        return FaultRun(
            fault=fault,
            place=self.place,
            paths=RunPaths(self.study.folder.absolute() / fault.name),
            program=self.program,
            mark=f"{self.token}-{fault.name}",
            patience_s=self.patience_s,
            say=lambda text: self.console.print(text, soft_wrap=True),
            halted=self.halted,
        )
