"""CommandSpec: one planned run of any program, by its command."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from jobkit.errors import UsageError, nearest
from jobkit.spec.placeholders import Value
from jobkit.spec.planned import COMMAND_LINE, PlannedRun
from jobkit.spec.setting import check_fields, setting

LAUNCHERS = ("srun", "torchrun", "once")
SCALINGS = ("strong", "weak")
RUN_DIR = "{run_dir}"  # stands in a command for the run's own folder, known when it starts
_SLUG = 60  # characters of the run_id before its hash


@dataclass(frozen=True, kw_only=True)
class CommandSpec(PlannedRun):
    """One run of a command at a size, one repeat. Raises UsageError for a value out of range."""

    name: str = setting("", "what the program is called (default: its file)", identity=False)
    command: tuple[str, ...] = setting((), "the words of the command", low=1, multiline=True)
    launcher: str = setting("srun", "what starts the ranks", choices=LAUNCHERS)
    nodes: int = setting(1, "number of nodes", low=1)
    ranks_per_node: int = setting(1, "ranks per node: one per GPU", low=1)
    repeat: int = setting(0, "index of this repeat of the same parameters", low=0)
    parameters: Mapping[str, Any] = setting({}, "the values of the study's parameters")
    by_size: tuple[str, ...] = setting((), "parameters that follow from the size", identity=False)
    template: tuple[str, ...] = setting(
        (), "the command with its placeholders, as template() gives it",
        identity=False, multiline=True,
    )  # fmt: skip
    auto: bool = setting(True, "measure a program of torch without a change to it")
    unit: str | None = setting(None, "what a step works on, as images or tokens", identity=False)
    work_per_step: float | None = setting(
        None, "units of work in one optimizer step over all ranks", low=0.0, identity=False
    )
    scaling: str | None = setting(
        None, "whether the work of a step is fixed, or that of a rank", identity=False
    )
    together: bool = setting(
        False, "the ranks share the work, though nothing may show it", identity=False
    )
    warmup_steps: int = setting(5, "first steps, which are not compared", low=0, identity=False)
    pattern: str | None = setting(None, "name of the program's log format", identity=False)
    patterns: Mapping[str, Any] = setting({}, "regular expressions of its log", identity=False)
    stop_signal: str = setting(
        "USR2", "signal that asks each rank to end", choices=("USR1", "USR2"), identity=False
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.scaling not in (None, *SCALINGS):
            raise UsageError(f"scaling = {self.scaling!r}: must be strong or weak")
        if self.work_per_step == 0:
            raise UsageError("work_per_step = 0: must be more than 0")
        for key, value in self.parameters.items():
            check_parameter(key, value)
        if not self.name:
            object.__setattr__(self, "name", program_name(self.command))

    @property
    def slug(self) -> str:
        """The readable part of the run_id: the program, the size, and the parameters."""
        size = f"n{self.nodes}-g{self.ranks_per_node}"
        shown = [f"{k}{v}" for k, v in self.parameters.items()]
        middle = re.sub(r"[^A-Za-z0-9._-]|\.\.+", "", "-".join([self.name, size, *shown]))
        return f"{middle[:_SLUG].strip('-.')}-r{self.repeat}"

    @property
    def planned_device(self) -> None:
        """The program decides."""

    @property
    def planned_epochs(self) -> None:
        """The program decides."""

    def in_folder(self, folder: str) -> "CommandSpec":
        """The run with its folder put into its command."""
        return replace(self, command=tuple(w.replace(RUN_DIR, folder) for w in self.command))

    def arguments(self) -> list[str]:
        """run.sh's options of a command, and the command."""
        words = ["--launcher", self.launcher, "--stop-signal", self.stop_signal]
        words += ["--warmup-steps", str(self.warmup_steps)]
        if self.unit:
            words += ["--unit", self.unit]
        if self.work_per_step is not None:
            words += ["--work-per-step", f"{self.work_per_step:.15g}"]
        return [*words, *([] if self.auto else ["--no-auto"]), "--", *self.command]

    def columns(self) -> dict[str, Any]:
        """The size, the parameters, and what a step works on."""
        return {
            "strategy": self.name,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "repeat": self.repeat,
            "world_size": self.world_size,
            "scaling": self.scaling,
            **self.parameters,
        }

    def comparable(self) -> dict[str, Any]:
        """The command and its parameters, without those that follow from the size.

        Of a single job, which has no placeholders, the command is as it was given.
        """
        own = {k: v for k, v in self.parameters.items() if k not in self.by_size}
        shared = {"strategy": self.name, "launcher": self.launcher, "auto": self.auto}
        command = self.template or self.command
        return {**shared, "scaling": self.scaling, **own, COMMAND_LINE: command}

    @property
    def script(self) -> str:
        """The script that a Python of the command would run first; empty where there is none."""
        program = PurePath(self.command[0]).name
        if not re.fullmatch(r"python[0-9.]*|torchrun|bash|sh", program) or len(self.command) < 2:
            return ""
        first = self.command[1]
        return first if first.endswith((".py", ".sh")) and RUN_DIR not in first else ""

    @property
    def program(self) -> str:
        """The first word of the command."""
        return self.command[0]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CommandSpec":
        """Make a spec; raise UsageError that names the nearest right key for an unknown one."""
        known = cls.__dataclass_fields__
        for key in values:
            if key not in known:
                raise UsageError(f"unknown setting '{key}'{nearest(str(key), known)}")
        return cls(**values)


def template(command: Sequence[str], by_size: Mapping[str, Any]) -> tuple[str, ...]:
    """What the runs of a command share at all sizes: its words before placeholders are replaced.

    by_size: the parameters that follow from the size, which stand behind the words.
    """
    return (*command, *(f"{name}={value}" for name, value in by_size.items()))


def check_parameter(name: object, value: object) -> None:
    """Raise UsageError for a parameter whose name or value cannot be used."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", name):
        raise UsageError(f"parameter {name!r}: a name has letters, digits and _ only")
    if not isinstance(value, Value):
        raise UsageError(f"parameter {name} = {value!r}: must be a number, a string, true or false")
    if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value):
        raise UsageError(f"parameter {name} = {value!r}: has a control character")


def program_name(command: Sequence[str]) -> str:
    """What a command is called: its script or module without the ending, else its program."""
    words = list(command)
    scripts = [word for word in words if re.search(r"\.(py|sh)$", word)]
    if "-m" in words[1:-1]:
        found = words[words.index("-m", 1) + 1].split(".")[-1]
    else:
        found = PurePath(scripts[0]).stem if scripts else PurePath(words[0]).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", found).strip("-._")[:40] or "command"
