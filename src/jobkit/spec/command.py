"""CommandSpec: one planned run of any program, by its command with placeholders.

"{batch}" and "{40 // ranks}" in a word are replaced by the values of a run. Between braces stands
whole-number arithmetic over names: + - * // % and parentheses, and /, which must divide without a
remainder. Nothing else is evaluated. {{ and }} are braces.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar

from jobkit.errors import UsageError, has_control, nearest
from jobkit.spec.runspec import AnyRun, RunSpec
from jobkit.spec.settings import check_fields, setting

Value = int | float | str | bool

LAUNCHERS = ("srun", "torchrun", "once")
SCALINGS = ("strong", "weak")
# Programs that start ranks themselves.
STARTERS = ["torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"]
STARTERS += ["deepspeed", "mpirun", "mpiexec", "srun"]
COMMAND_LINE = "command line"  # of comparable(): no parameter can have this name
RUN_DIR = "{run_dir}"  # stands in a command for the run's own folder, known when it starts
_MAX_SLUG = 60  # characters of the run_id before its hash
_MAX_EXPRESSION = 200  # characters
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def fill(text: str, names: Mapping[str, Value]) -> str:
    """The text with each placeholder replaced. Raises UsageError that says what is wrong."""

    def replaced(part: re.Match[str]) -> str:
        if part[1] is not None:
            return str(_evaluate(part[1], names))
        if part[0] in ("{{", "}}"):
            return part[0][0]
        raise UsageError(f"{text!r}: a single '{part[0]}': write {part[0] * 2} for a brace")

    return _PART.sub(replaced, text)


def resolve(value: Any, names: Mapping[str, Value]) -> Any:
    """The value with its placeholders replaced; a text that is one placeholder keeps its type."""
    if not isinstance(value, str):
        return value
    whole = re.fullmatch(r"\{([^{}]*)\}", value)
    return _evaluate(whole[1], names) if whole else fill(value, names)


def used(value: Any) -> set[str]:
    """The names in the placeholders of a value."""
    texts = [p[1] for p in _PART.finditer(value) if p[1]] if isinstance(value, str) else []
    return {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}


def _evaluate(text: str, names: Mapping[str, Value]) -> Value:
    """The value of what stands between two braces."""
    if (name := text.strip()) in names:
        return names[name]
    try:
        tree = ast.parse(name if len(text) <= _MAX_EXPRESSION else "", mode="eval")
        return _number(tree.body, names)
    except UsageError as error:
        raise UsageError(f"{{{text}}}: {error}") from None
    except ZeroDivisionError:
        raise UsageError(f"{{{text}}}: divides by zero") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UsageError(
            f"{{{text[:_MAX_EXPRESSION]}}}: not arithmetic of names, whole numbers, + - * / // % "
            "and parentheses; write {{ for a brace"
        ) from None


def _number(node: ast.expr, names: Mapping[str, Value]) -> int:
    """The value of a part of an expression. Raises UsageError; ValueError for no arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            known = nearest(node.id, names) or f" (known: {', '.join(names)})"
            raise UsageError(f"unknown name '{node.id}'{known}; write {{{{ for a brace")
        if type(value := names[node.id]) is not int:
            raise UsageError(f"{node.id} is {value!r}, and arithmetic is of whole numbers")
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, names)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError
    left, right = _number(node.left, names), _number(node.right, names)
    if isinstance(node.op, ast.Div) and left % right:
        raise UsageError(f"{left} / {right} is not a whole number (// would round down)")
    return _OPERATORS[type(node.op)](left, right)


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """What a study of a command has, and each of its runs alike."""

    launcher: str = setting("srun", "command: what starts its ranks", choices=LAUNCHERS)
    pattern: str | None = setting(None, "command: name of its log's format", identity=False)
    auto: bool = setting(True, "command: measure a program of torch without a change to it")
    warmup_steps: int = setting(5, "command: first steps, not compared", low=0, identity=False)
    why: int = setting(
        5, "command: steps profiled at each of a few places; 0: none", low=0, identity=False
    )


@dataclass(frozen=True, kw_only=True)
class CommandSpec(ProgramOptions, AnyRun):
    """One run of a command at a size, one repeat. Raises UsageError for a value out of range."""

    name: str = setting("", "what the program is called (default: its file)", identity=False)
    command: tuple[str, ...] = setting((), "the words of the command", low=1, multiline=True)
    nodes: int = setting(1, "number of nodes", low=1)
    ranks_per_node: int = setting(1, "ranks per node: one per GPU", low=1)
    repeat: int = setting(0, "index of this repeat of the same parameters", low=0)
    parameters: Mapping[str, Any] = setting({}, "the values of the study's parameters")
    by_size: tuple[str, ...] = setting((), "parameters that follow from the size", identity=False)
    template: tuple[str, ...] = setting(
        (), "the words before placeholders are replaced, then NAME=VALUE of each of by_size",
        identity=False, multiline=True,
    )  # fmt: skip
    unit: str | None = setting(None, "what a step works on, as images or tokens", identity=False)
    work_per_step: float | None = setting(
        None, "units of work in one optimizer step over all ranks", low=0.0, identity=False
    )
    scaling: str | None = setting(
        None, "whether the work of a step is fixed, or that of a rank",
        choices=SCALINGS, identity=False,
    )  # fmt: skip
    together: bool = setting(
        False, "the ranks share the work, though nothing may show it", identity=False
    )

    # The program decides what RunSpec has of these.
    device: ClassVar[str | None] = None
    planned_epochs: ClassVar[int | None] = None
    whole_node: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        for key, value in self.parameters.items():
            check_parameter(key, value)
        if not self.name:
            object.__setattr__(self, "name", program_name(self.command))

    @property
    def run_id(self) -> str:
        """The program, the size, the parameters and the repeat, with a hash of the rest."""
        words = [self.name, f"n{self.nodes}-g{self.ranks_per_node}"]
        words += [f"{k}{v}" for k, v in self.parameters.items()]
        middle = re.sub(r"[^A-Za-z0-9._-]|\.\.+", "", "-".join(words))
        return self.with_hash(f"{middle[:_MAX_SLUG].strip('-.')}-r{self.repeat}")

    def arguments(self) -> list[str]:
        """run.sh's options of a command, and the command."""
        words = ["--launcher", self.launcher, "--warmup-steps", str(self.warmup_steps)]
        words += ["--why", str(self.why)]
        words += ["--unit", self.unit] if self.unit else []
        if self.work_per_step is not None:
            words += ["--work-per-step", f"{self.work_per_step:.15g}"]
        return [*words, *([] if self.auto else ["--no-auto"]), "--", *self.command]

    def columns(self) -> dict[str, Any]:
        """The size, and what a step works on."""
        names = ("nodes", "ranks_per_node", "repeat", "world_size", "scaling")
        return {"strategy": self.name, **{name: getattr(self, name) for name in names}}

    def decided(self, _recorded: Mapping[str, Any]) -> "CommandSpec":
        """What is planned: nothing of it is left to the device."""
        return self

    def comparable(self) -> dict[str, Any]:
        """The command and its parameters, without those that follow from the size.

        Of a single job, which has no placeholders, the command is as it was given.
        """
        parameters = {k: v for k, v in self.parameters.items() if k not in self.by_size}
        shared = {"strategy": self.name, "launcher": self.launcher, "auto": self.auto}
        command = self.template or self.command
        return {**shared, "scaling": self.scaling, **parameters, COMMAND_LINE: command}

    @property
    def script(self) -> str:
        """The script that a Python of the command would run first; empty where there is none."""
        program = PurePath(self.command[0]).name
        if not re.fullmatch(r"python[0-9.]*|torchrun|bash|sh", program) or len(self.command) < 2:
            return ""
        first = self.command[1]
        return first if first.endswith((".py", ".sh")) and RUN_DIR not in first else ""


PlannedRun = RunSpec | CommandSpec


def check_starter(command: Sequence[str], launcher: str, ranks: int) -> None:
    """Raise UsageError for a command that starts ranks itself: each rank would start them all."""
    words = [PurePath(word).name for word in command[:3]]
    name = words[2] if words[1:2] == ["-m"] and words[2:] else words[0]
    if ranks > 1 and launcher != "once" and name in STARTERS:
        fix = "leave it out, as -- python train.py, or say --launcher once"
        raise UsageError(f"{name} starts the ranks itself, and jobkit a process for each: {fix}")


def check_parameter(name: object, value: object) -> None:
    """Raise UsageError for a parameter whose name or value cannot be used."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", name):
        raise UsageError(f"parameter {name!r}: a name has letters, digits and _ only")
    if not isinstance(value, (int, float, str)):
        raise UsageError(f"parameter {name} = {value!r}: must be a number, a string, true or false")
    if isinstance(value, str) and has_control(value):
        raise UsageError(f"parameter {name} = {value!r}: has a control character")


def program_name(command: Sequence[str]) -> str:
    """What a command is called: its script or module without the ending, else its program."""
    words = list(command)
    scripts = [word for word in words if re.search(r"\.(py|sh)$", word)]
    if "-m" in words[1:-1]:
        name = words[words.index("-m", 1) + 1].split(".")[-1]
    else:
        name = PurePath(scripts[0]).stem if scripts else PurePath(words[0]).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:40] or "command"
