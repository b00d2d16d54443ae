"""A run of any program: its command with placeholders, and the grid of runs that a study plans.

"{batch}" and "{40 // ranks}" in a word are replaced by the values of a run. Between braces stands
whole-number arithmetic over names: + - * // % and parentheses, and /, which must divide without a
remainder. Nothing else is evaluated. {{ and }} are braces."""

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.spec.runspec import COMMAND_LINE, SETTINGS, PlannedRun, plain_type
from jobkit.spec.settings import check_fields, setting

Value = int | float | str | bool

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WHOLE = re.compile(r"\{([^{}]*)\}")
_LONGEST = 200  # characters of an expression
_LARGEST = 10**15
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_WHAT = "names, whole numbers, + - * / // % and parentheses"


def fill(text: str, names: Mapping[str, Value]) -> str:
    """The text with each placeholder replaced. Raises UsageError that says what is wrong."""

    def replaced(part: re.Match[str]) -> str:
        if part[1] is not None:
            return str(_value(part[1], names))
        if part[0] in ("{{", "}}"):
            return part[0][0]
        raise UsageError(f"{text!r}: a single '{part[0]}': write {part[0] * 2} for a brace")

    return _PART.sub(replaced, text)


def resolve(value: Any, names: Mapping[str, Value]) -> Any:
    """The value with its placeholders replaced; a text that is one placeholder keeps its type."""
    if not isinstance(value, str):
        return value
    whole = _WHOLE.fullmatch(value)
    return _value(whole[1], names) if whole else fill(value, names)


def resolve_all(given: Mapping[str, Any], names: Mapping[str, Value]) -> dict[str, Value]:
    """Parameters with their placeholders replaced; they may name each other, in no circle.

    Raises UsageError that names the parameter.
    """
    done: dict[str, Value] = dict(names)
    waiting = dict(given)
    while waiting:
        ready = [n for n, v in waiting.items() if not used(v) & waiting.keys()]
        if not ready:
            raise UsageError(f"parameters {', '.join(waiting)}: each needs another one's value")
        for name in ready:
            try:
                done[name] = resolve(waiting.pop(name), done)
            except UsageError as error:
                raise UsageError(f"parameter {name}: {error}") from None
    return {name: done[name] for name in given}


def used(value: Any) -> set[str]:
    """The names in the placeholders of a value."""
    texts = [p[1] for p in _PART.finditer(value) if p[1]] if isinstance(value, str) else []
    return {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)}


def _value(text: str, names: Mapping[str, Value]) -> Value:
    """The value of what stands between two braces."""
    if (name := text.strip()) in names:
        return names[name]
    try:
        if len(text) > _LONGEST:
            raise ValueError
        tree = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _no_arithmetic(text) from None
    return _number(tree, text, names)


def _number(node: ast.expr, text: str, names: Mapping[str, Value]) -> int:
    """The value of a part of an expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.Name):
        found = _named(node.id, text, names)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        found = _number(node.operand, text, names)
        found = -found if isinstance(node.op, ast.USub) else found
    elif isinstance(node, ast.BinOp):
        left, right = _number(node.left, text, names), _number(node.right, text, names)
        found = _combined(node.op, left, right, text)
    else:
        raise _no_arithmetic(text)
    if abs(found) > _LARGEST:
        raise UsageError(f"{{{text}}}: the number is too large")
    return found


def _combined(op: ast.operator, left: int, right: int, text: str) -> int:
    exact = isinstance(op, ast.Div)
    if not exact and type(op) not in _OPERATORS:
        raise _no_arithmetic(text)
    if right == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
        raise UsageError(f"{{{text}}}: divides by zero")
    if exact and left % right:
        raise UsageError(
            f"{{{text}}}: {left} / {right} is not a whole number (// would round down)"
        )
    return left // right if exact else _OPERATORS[type(op)](left, right)


def _named(name: str, text: str, names: Mapping[str, Value]) -> int:
    if name not in names:
        hint = nearest(name, names)
        known = "" if hint else f" (known: {', '.join(names)})"
        raise UsageError(f"{{{text}}}: unknown name '{name}'{hint}{known}; write {{{{ for a brace")
    if type(value := names[name]) is not int:
        raise UsageError(f"{{{text}}}: {name} is {value!r}, and arithmetic is of whole numbers")
    return value


def _no_arithmetic(text: str) -> UsageError:
    shown = text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."
    return UsageError(f"{{{shown}}}: not arithmetic of {_WHAT}; write {{{{ for a brace")


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


_NAMES = """
run_id study series status reason evidence evidence_file exit_code attempts strategy world_size
scaling epochs_planned epochs_done images_per_s time_per_epoch_s time_per_epoch_min_s
time_per_epoch_max_s data_wait_share total_time_s start_time_s end_time_s peak_memory_mib
allocated_memory_mib reserved_memory_mib device_memory_mib resident_memory_mib
train_loss val_loss val_accuracy best_val_accuracy train_samples test_samples
parameters threads_used device device_planned devices device_type backend torch_version
python_version cuda_version hip_version nccl_version driver_version cudnn_version cudnn_benchmark
node_list git_commit job_id shard_groups problems warnings warnings_text lines_rejected records_lost
throughput throughput_unit throughput_source ranks_together step_time_s step_p50_s step_p95_s
step_p99_s step_max_s steps_timed wall_time_s cpu_busy_mean cpu_busy_max node_memory_mean_mib
node_memory_max_mib gpu_busy_mean gpu_busy_max gpu_memory_mean_mib gpu_memory_max_mib energy_gpu_j
energy_node_j energy_source joules_per_work joules_of work_source problems
"""
_TAKEN = frozenset(_NAMES.split())
_BEGINNINGS = ("startup_", "breakdown_", "slurm_")
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def check_name_free(name: str) -> None:
    """Raise UsageError for a parameter's name that is a column with another meaning."""
    if name in _TAKEN or (name.startswith(_BEGINNINGS) and name not in SETTINGS):
        raise UsageError(f"parameter {name}: results.csv has such a column; choose another name")


def check_fits(name: str, value: Value) -> None:
    """Raise UsageError for a value that the column of a setting of this name cannot hold."""
    if name not in SETTINGS:
        return
    kind = plain_type(name)[0]
    if kind is str or type(value) is kind or (kind is float and type(value) is int):
        return
    raise UsageError(
        f"parameter {name} = {value!r}: column {name} of results.csv holds {_WORDS[kind]}; "
        "choose another name"
    )


SIZE_NAMES = ("ranks", "nodes", "ranks_per_node", "repeat")
_WORK = ("unit", "per_step", "scaling", "together")


@dataclass(frozen=True, kw_only=True)
class CommandGrid:
    """What a study says of its command. Raises UsageError for what no size could use."""

    command: Sequence[str]
    launcher: str
    parameters: Mapping[str, Any]
    sweep: Mapping[str, Sequence[Any]]
    work: Mapping[str, Any]
    fixed: Mapping[str, Any]  # fields of CommandSpec, the same in every run

    def __post_init__(self) -> None:
        one_of("launcher", self.launcher, LAUNCHERS)
        for name, value in [*self.parameters.items(), *self._swept()]:
            check_parameter(name, value)
            if name in (*SIZE_NAMES, "run_dir"):
                raise UsageError(f"parameter {name}: this name is the size's; choose another")
        for key in self.work:
            if key not in _WORK:
                raise UsageError(f"work: unknown key '{key}'{nearest(str(key), _WORK)}")
        if (scaling := self.work.get("scaling")) is not None:
            one_of("scaling", scaling, SCALINGS)
        if "per_step" in self.work and not self.work.get("unit"):
            raise UsageError(
                'work: per_step needs its unit: --unit images, or unit = "images" in the study'
            )

    def _check_sweep(self) -> None:
        """Raise UsageError for a sweep whose runs would all be the same, or some of them."""
        texts = [*self.command, *self.parameters.values(), self.work.get("per_step")]
        texts += [value for _, value in self._swept()]
        known = set[str]().union(*map(used, texts))
        for name, values in self.sweep.items():
            if name not in known:
                hint = nearest(name, known)
                raise UsageError(f"sweep {name}: no {{{name}}} in the command{hint}")
            for at, value in enumerate(values):
                if str(value) in map(str, values[:at]):  # a command has 1 and "1" alike
                    raise UsageError(f"sweep {name}: has {value!r} twice")

    def _swept(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, values in self.sweep.items() for value in values)

    def runs(self, sizes: Sequence[tuple[int, int]], repeats: int) -> list[CommandSpec]:
        """Every run of the grid.

        Raises UsageError where per_step contradicts scaling, or a parameter has a column's name.
        """
        self._check_sweep()
        for name in (*self.parameters, *self.sweep):
            check_name_free(name)
        points = [
            dict(zip(self.sweep, p, strict=True)) for p in itertools.product(*self.sweep.values())
        ]
        found = []
        for point in points:
            given = {**self.parameters, **point}
            series = [self._spec(given, size, 0) for size in sizes]
            scaling = self._scaling(series)
            for size, repeat in itertools.product(sizes, range(repeats)):
                found.append(self._spec(given, size, repeat, scaling))
        return found

    def _spec(
        self,
        given: Mapping[str, Any],
        size: tuple[int, int],
        repeat: int,
        scaling: str | None = None,
    ) -> CommandSpec:
        nodes, per_node = size
        names: dict[str, Value] = {"ranks": nodes * per_node, "nodes": nodes}
        names |= {"ranks_per_node": per_node, "repeat": repeat, "run_dir": RUN_DIR}
        by_size = {n: v for n, v in given.items() if _follows_size(n, given)}
        try:
            parameters = resolve_all(given, names)
            for name, value in parameters.items():
                check_fits(name, value)
            names |= parameters
            return CommandSpec(
                **self.fixed,
                command=tuple(fill(word, names) for word in self.command),
                launcher=self.launcher,
                nodes=nodes,
                ranks_per_node=per_node,
                repeat=repeat,
                parameters=parameters,
                by_size=tuple(by_size),
                template=template(self.command, by_size),
                unit=self.work.get("unit"),
                work_per_step=_work_per_step(self.work.get("per_step"), names),
                scaling=scaling,
                together=self.work.get("together", False),
            )
        except UsageError as error:
            raise UsageError(f"at {nodes * per_node} ranks: {error}") from None

    def _scaling(self, series: Sequence[CommandSpec]) -> str | None:
        """Whether the work of a step stays or grows with the ranks; None: neither, or not said."""
        stated = self.work.get("scaling")
        work = {s.world_size: s.work_per_step for s in series if s.work_per_step is not None}
        if len(work) < 2:
            return stated
        strong = len(set(work.values())) == 1
        first, *others = work.items()
        weak = all(w * first[0] == first[1] * ranks for ranks, w in others)
        if stated and not (strong if stated == "strong" else weak):
            told = ", ".join(f"{w:g} at {n} ranks" for n, w in work.items())
            wanted = "the same at each size" if stated == "strong" else "in proportion to the ranks"
            raise UsageError(
                f"work: scaling is {stated}, so per_step must be {wanted}; it is {told}"
            )
        return stated or ("strong" if strong else "weak" if weak else None)


def _work_per_step(given: Any, names: Mapping[str, Value]) -> float | None:
    if given is None:
        return None
    found = resolve(given, names)
    if isinstance(found, str) and re.fullmatch(r"\d+(\.\d+)?([eE]\+?\d{1,2})?", found):
        found = float(found)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e18:
        raise UsageError(f"work: per_step = {given!r}: must be a number above 0, or a placeholder")
    return float(found)


def _follows_size(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a parameter's value follows from the size, maybe by way of another parameter."""
    seen, waiting = set[str](), {name}
    while waiting:
        seen |= waiting
        waiting = {n for one in waiting for n in used(given.get(one))} - seen
    return bool(seen & set(SIZE_NAMES) - {name})
