"""Study and Plan: the grid of runs to compare, checked and saved before the first job starts.

A study is a TOML file:

    name = "strong"
    strategies = ["ddp", "fsdp"]
    gpus = [1, 2, 4, "2x4"]      # total ranks, or NODESxRANKS
    repeats = 3
    seed = 0                     # shuffles the order of the runs
    [settings]                   # any setting of RunSpec, the same in every run
    epochs = 5
    [sweep]                      # any setting of RunSpec, one run for each value
    precision = ["fp32", "bf16"]

or of any other program, by its command, in which {names} are replaced (see command.py):

    command = ["python", "train.py", "--batch={batch}", "--accumulate={40 / ranks}"]
    launcher = "srun"            # or torchrun, or once: the command brings its own launcher
    [parameters]                 # free names, columns of results.csv
    batch = 12
    [work]                       # what one optimizer step does, over all ranks
    unit = "tokens"
    per_step = "{batch * 40 * 1024}"
    together = true              # though nothing may show that the ranks talk to each other
"""

import argparse
import itertools
import json
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.files import (
    MOST_TOML,
    file_names,
    is_there,
    load_json,
    load_toml,
    read_regular,
    read_text,
)
from jobkit.paths import (
    REPOSITORY,
    StudyPaths,
    check_name,
    find_named,
    logs_root,
    read_json,
    write_whole,
)
from jobkit.permissions import closed_to_others
from jobkit.spec.command import LAUNCHERS, CommandGrid, CommandSpec, Value, program_name, used
from jobkit.spec.runspec import (
    ONE_RANK,
    SETTINGS,
    STRATEGIES,
    PlannedRun,
    RunSpec,
    check_keys,
    check_value,
    overridden,
    plain_type,
)
from jobkit.spec.settings import check_fields, setting
from jobkit.spec.strategies import owners


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UsageError for a file that cannot be read."""
    try:
        return load_toml(read_text(path, MOST_TOML))
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def size_of(gpus: int | str, per_node: int | None) -> tuple[int, int]:
    """A size as (nodes, ranks per node): 8 on nodes of 4 is (2, 4); "2x3" is (2, 3)."""
    if isinstance(gpus, str) and (match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", gpus)):
        return int(match[1]), int(match[2])
    if isinstance(gpus, str) and re.fullmatch(r"[1-9]\d{0,6}", gpus):
        gpus = int(gpus)
    if type(gpus) is not int or gpus < 1:
        hint = ""
        if isinstance(gpus, str) and re.fullmatch(r"\d+(,\d+)+,?", gpus):
            hint = f"; separate sizes by spaces: --gpus {' '.join(filter(None, gpus.split(',')))}"
        elif isinstance(gpus, str) and re.match(r"[A-Za-z./]", gpus):
            hint = "; a command comes after --, as: --gpus 1 2 -- python train.py"
        raise UsageError(
            f"gpus {gpus!r}: must be a whole number, 1 or more, or NODESxRANKS as 2x4{hint}"
        )
    if per_node is None or gpus <= per_node:
        return 1, gpus
    if gpus % per_node:
        raise UsageError(f"gpus {gpus}: does not fill nodes of {per_node}; say NODESxRANKS, as 2x3")
    return gpus // per_node, per_node


STUDIES = REPOSITORY / "hpc" / "studies"
PLAN_VERSION = 1
_MOST_RUNS = 100_000  # of a study: more are a mistake, and would fill the memory first
_MOST_BYTES = 32 << 20  # of a plan.json
_SET_BY_THE_GRID = ("strategy", "nodes", "ranks_per_node", "repeat")
_DEFAULT_STRATEGIES = ("ddp", "fsdp")
_FOLDERS = ("single", "comm")  # of single jobs, under logs/
_OF_BOTH = ("stop_signal",)  # a setting of RunSpec, and a field of a study of a command
# What only a study of a command has: of each, the default.
_OF_COMMANDS: dict[str, Any] = {
    "launcher": "srun", "parameters": {}, "work": {}, "pattern": None, "patterns": {},
    "auto": True, "warmup_steps": 5, "stop_signal": "USR2",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is to be compared. Raises UsageError for a value that cannot be used."""

    name: str
    description: str = setting("", "purpose of the study", multiline=True)
    strategies: tuple[str, ...] = setting(_DEFAULT_STRATEGIES, "strategies to compare")
    gpus: tuple[int | str, ...] = setting((1, 2, 4), "sizes: total ranks, or NODESxRANKS", low=1)
    gpus_per_node: int | None = setting(
        None, "ranks on a full node (default: all ranks of a plain number share one node)", low=1
    )
    repeats: int = setting(1, "repeats of each setting", low=1)
    seed: int = setting(0, "seed of the order of the runs", low=0)
    settings: Mapping[str, Any] = setting({}, "settings of RunSpec, the same in every run")
    sweep: Mapping[str, tuple[Any, ...]] = setting(
        {}, "settings of RunSpec, or parameters of the command, one run per value", low=1
    )
    command: tuple[str, ...] = setting(
        (), "the words of a command, in place of jobkit's own training", multiline=True
    )
    launcher: str = setting("srun", "command: what starts its ranks", choices=LAUNCHERS)
    parameters: Mapping[str, Any] = setting({}, "command: values of its placeholders")
    work: Mapping[str, Any] = setting({}, "command: unit, per_step, scaling and together")
    pattern: str | None = setting(None, "command: name of its log's format")
    patterns: Mapping[str, Any] = setting({}, "command: regular expressions of its log")
    auto: bool = setting(True, "command: measure a program of torch without a change to it")
    warmup_steps: int = setting(5, "command: first steps, which are not compared", low=0)
    stop_signal: str = setting(
        "USR2", "command: signal that asks each rank to end", choices=("USR1", "USR2")
    )

    def __post_init__(self) -> None:
        check_name("study name", self.name)
        check_fields(self)
        for name in ("strategies", "gpus"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        if self.command:
            self._check_command()
        else:
            self._check_training()

    def _check_command(self) -> None:
        if self.strategies not in ((), _DEFAULT_STRATEGIES):
            raise UsageError("strategies are of jobkit's own training, not of a command")
        object.__setattr__(self, "strategies", ())
        if self.settings:
            name = next(iter(self.settings)).replace("_", "-")
            raise UsageError(
                f"--{name} is a setting of jobkit's own training: a command has its options in its "
                "own words, and its values in [parameters]"
            )
        if self.patterns and self.pattern:
            raise UsageError("give pattern or [patterns], not both")
        self._grid()

    def _check_training(self) -> None:
        for key, default in _OF_COMMANDS.items():
            if getattr(self, key) != default:
                raise UsageError(f"'{key}' is of a study of a command: give command = [...]")
        if not self.strategies:
            raise UsageError("strategies = []: must be a list of strings, 1 or more")
        for strategy in self.strategies:
            one_of("strategy", strategy, STRATEGIES)
        for table in (self.settings, self.sweep):
            check_keys(table)
            for key in _SET_BY_THE_GRID:
                if key in table:
                    raise UsageError(
                        f"'{key}' is not a setting of a study: use strategies, gpus, repeats"
                    )

    @classmethod
    def load(cls, source: str | Path, **overrides: Any) -> "Study":
        """Read a study from a TOML file, or by its bare name from hpc/studies.

        Overrides replace a study's field of that name, or else a setting of the training.
        Raises UsageError for a missing or invalid file, or an unknown key.
        """
        values = read_toml(find_named("study", source, STUDIES))
        known = tuple(cls.__dataclass_fields__)
        for key in values:
            if key not in known and key in SETTINGS:
                raise UsageError(
                    f"{source}: '{key}' is a setting of the training: write it under [settings]"
                )
            if key not in known:
                raise UsageError(
                    f"{source}: unknown key '{key}'{nearest(key, (*known, *SETTINGS))}"
                )
        if values.get("command") == []:
            raise UsageError(f"{source}: command = []: its first word is the program")
        if "command" in overrides and not values.get("command"):
            raise UsageError(
                f"{source} is a study of jobkit's own training: for a command leave out --study"
            )
        values["name"] = overrides.pop("name", values.get("name", Path(source).stem))
        try:
            return cls(**values).changed(**overrides)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    def changed(self, **overrides: Any) -> "Study":
        """The study with some fields or settings replaced; a replaced setting is swept no more."""
        own = {k: v for k, v in overrides.items() if k in self.__dataclass_fields__}
        if not (self.command or "command" in own):
            own = {k: v for k, v in own.items() if k not in _OF_BOTH}
        if "work" in own:
            own["work"] = {**self.work, **own["work"]}
        rest = {k: v for k, v in overrides.items() if k not in own}
        check_keys(rest)
        settings = overridden(self.settings, rest)
        sweep = {k: v for k, v in overridden(self.sweep, rest).items() if k not in rest}
        return replace(self, **{"settings": settings, "sweep": sweep, **own})

    def sizes(self) -> list[tuple[int, int]]:
        """Each size as (nodes, ranks on each node)."""
        return [size_of(gpus, self.gpus_per_node) for gpus in self.gpus]

    @classmethod
    def of_command(cls, command: Sequence[str], **fields: Any) -> "Study":
        """A study of a command, called after its program where no name is given."""
        name = fields.pop("name", None) or program_name(command)
        if name in _FOLDERS:
            name += "-study"
        return cls(name=name, command=tuple(command)).changed(**fields)

    def expand(self) -> "Plan":
        """Make the plan: every run of the grid once, in an order shuffled by the seed."""
        counts = [
            len(self.strategies) or 1,
            len(self.gpus),
            self.repeats,
            *map(len, self.sweep.values()),
        ]
        if (count := math.prod(counts)) > _MOST_RUNS:
            raise UsageError(f"study {self.name}: {count:,} runs, more than {_MOST_RUNS:,}")
        notes: list[str] = []
        found = self._commands() if self.command else self._trainings(notes)
        runs = {spec.run_id: spec for spec in found}
        if not runs:
            raise UsageError("the study has no run: single and dp need a size of 1")
        order = sorted(runs)
        random.Random(self.seed).shuffle(order)
        return Plan(study=self, runs={run_id: runs[run_id] for run_id in order}, notes=tuple(notes))

    def _grid(self) -> CommandGrid:
        """What is said of the command."""
        names = ("pattern", "patterns", "auto", "warmup_steps", "stop_signal")
        return CommandGrid(
            command=self.command,
            launcher=self.launcher,
            parameters=self.parameters,
            sweep=self.sweep,
            work=self.work,
            fixed={name: getattr(self, name) for name in names},
        )

    def _commands(self) -> Sequence[CommandSpec]:
        """Each run of a command."""
        try:
            return self._grid().runs(self.sizes(), self.repeats)
        except UsageError as error:
            raise UsageError(f"study {self.name}: {error}") from None

    def _trainings(self, notes: list[str]) -> Iterator[RunSpec]:
        """Each run of jobkit's own training; what is not planned is noted."""
        points = [
            dict(zip(self.sweep, p, strict=True)) for p in itertools.product(*self.sweep.values())
        ]
        for strategy, (nodes, ranks) in itertools.product(self.strategies, self.sizes()):
            if strategy in ONE_RANK and nodes * ranks > 1:
                notes.append(f"{strategy} runs at 1 rank only: not planned at {nodes * ranks}")
                continue
            for point, repeat in itertools.product(points, range(self.repeats)):
                # What another strategy alone has makes no second run of the same.
                swept = {k: v for k, v in point.items() if strategy in (owners(k) or [strategy])}
                shape = {"strategy": strategy, "nodes": nodes, "ranks_per_node": ranks}
                yield self._spec({**self.settings, **swept, **shape, "repeat": repeat})

    def _spec(self, values: Mapping[str, Any]) -> RunSpec:
        """One run of the grid; UsageError names the study."""
        try:
            return RunSpec(**values)
        except UsageError as error:
            raise UsageError(f"study {self.name}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields of its kind, as JSON takes them."""
        other = ("strategies", "settings") if self.command else ("command", *_OF_COMMANDS)
        return {n: getattr(self, n) for n in self.__dataclass_fields__ if n not in other}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a study, by run_id, in the order in which they start."""

    study: Study
    runs: Mapping[str, PlannedRun]
    notes: tuple[str, ...] = ()
    folder: Path | None = None  # where it was read from; None: the study's folder under logs/

    @property
    def paths(self) -> StudyPaths:
        return StudyPaths(self.folder) if self.folder else StudyPaths.named(self.study.name)

    @closed_to_others()
    def save(self) -> None:
        """Write plan.json, whole. Runs planned before under this name stay planned."""
        before = Plan.read(self.paths.plan).runs if self.paths.plan.exists() else {}
        runs = [{"run_id": k, "spec": s.to_dict()} for k, s in {**before, **self.runs}.items()]
        content = {
            "v": PLAN_VERSION,
            "study": self.study.to_dict(),
            "notes": self.notes,
            "runs": runs,
        }
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.paths.plan, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read plan.json; raises UsageError when it is absent or not a plan."""
        try:
            content = load_json(read_regular(path, _MOST_BYTES, follow=False))
            study = Study(**content["study"])
            found = [(check_name("run id", r["run_id"]), r["spec"]) for r in content["runs"]]
            runs = {run_id: read_spec(spec) for run_id, spec in found}
            notes = tuple(content["notes"])
            return cls(study=study, runs=runs, notes=notes, folder=path.parent)
        except FileNotFoundError:
            raise UsageError(f"no plan at {path}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a plan: {error}") from None


def read_spec(values: Mapping[str, Any]) -> RunSpec | CommandSpec:
    """The spec in spec.json, or in a plan. Raises UsageError."""
    return CommandSpec.from_dict(values) if "command" in values else RunSpec.from_dict(values)


_FILES = ("plan.json", "logs.json")  # a study's folder has one of them


def find_study(given: str | Path | None = None, *, planned: bool = False) -> Path:
    """The folder of a study, by its path or bare name; the newest one when none is given.

    planned: the newest of those with a plan: a list of logs has no runs to look at or to end.
    Raises UsageError that names the nearest study where there is none.
    """
    if given is None:
        return _newest(planned)
    text = str(given)
    named = logs_root() / text
    bare = text not in ("", ".", "..") and "/" not in text
    try:
        folder = named if bare and named.is_dir() else Path(text)
        there = bool(text) and folder.is_dir()
    except OSError as error:  # too long for a name
        raise UsageError(f"no study {text!r}: {error.strerror}") from None
    if not there:
        raise UsageError(_unknown(text, folder))
    if is_there(folder / "logs.json"):
        return folder
    if not is_there(folder / "plan.json") and is_run(folder):
        parent = folder.absolute().parent
        raise UsageError(f"{text} is the folder of one run: name its study, {parent}")
    if not is_there(folder / "plan.json") and not run_folders(folder):
        raise UsageError(f"{text} has no plan.json and no run: it is not a study")
    return folder


def is_of_logs(folder: Path) -> bool:
    """Whether a study's folder lists logs that exist already, and plans no run."""
    return is_there(folder / "logs.json") and not is_there(folder / "plan.json")


def read_plan(folder: Path) -> Plan:
    """The plan of a study's folder or, where single jobs have none, that of the runs in it.

    Raises UsageError where a plan cannot be read, and without one where no run has a spec.json.
    """
    if is_there(folder / "plan.json"):
        return Plan.read(folder / "plan.json")
    found = {f.name: spec for f in run_folders(folder) if (spec := own_spec(f))}
    runs = {check_name("run id", name): spec for name, spec in found.items()}
    if not runs:
        raise UsageError(f"{folder} has no plan.json, and no run in it has a spec.json")
    return Plan(study=Study(name="single"), runs=runs, folder=folder)


def own_spec(folder: Path) -> PlannedRun | None:
    """The spec that lies in a run's folder, where this version can read it."""
    try:
        return read_spec((read_json(folder / "spec.json") or {})["spec"])
    except (KeyError, TypeError, AttributeError, UsageError):
        return None


def _newest(planned: bool) -> Path:
    seen = [p for p in _plans() if p.name == "plan.json" or not planned]
    plans = [(when, p) for p in seen if (when := _written(p)) is not None]
    if not plans:
        single = logs_root() / "single"
        hint = f"; single runs are in {single}: name that" if single.is_dir() else ""
        raise UsageError(f"no study in {logs_root()}: start one with run_benchmarks.py{hint}")
    return max(plans)[1].parent


def _plans() -> list[Path]:
    """What every study has that can be seen: its plan, or the list of its logs."""
    plans = (logs_root() / name / file for name in file_names(logs_root()) for file in _FILES)
    return [path for path in plans if is_there(path)]


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # the study was just removed
        return None


def _unknown(text: str, folder: Path) -> str:
    """The line for a study that is not there."""
    if folder.is_file():
        return f"{text} is a file: give the study's folder"
    known = sorted({p.parent.name for p in _plans()})
    shown = f" (in {logs_root()}: {', '.join(known)})" if known else f" in {logs_root()}"
    return f"no study {text!r}{nearest(folder.name, known)}{shown}"


def is_run(folder: Path) -> bool:
    """Whether a folder is one of a run: something of a run lies in it."""
    names = ("spec.json", "metrics", "train.log")
    return any(is_there(folder / name) for name in names)


def run_folders(folder: Path, but: Collection[str] = ()) -> list[Path]:
    """The folders of runs in a study's folder, by name; but: names that are left out."""
    return [f for n in sorted({*file_names(folder)}.difference(but)) if is_run(f := folder / n)]


_BOOLS = {"true": True, "false": False}


def add_grid_arguments(made: argparse.ArgumentParser) -> None:
    """Add --sweep and --parameter."""
    group = made.add_argument_group("grid", "Both take several words, and may be repeated.")
    group.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=V1,V2",
        help="one run for each value of a setting, or of a placeholder {NAME} of the command",
    )
    group.add_argument(
        "--parameter",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="value of a placeholder {NAME} of the command, and a column of results.csv",
    )


def with_words(
    study: Study, sweeps: Sequence[str], parameters: Sequence[str], given: Collection[str] = ()
) -> Study:
    """The study with what NAME=V1,V2 (sweeps) and NAME=VALUE (parameters) say, as last word.

    given: settings that have an option of their own on the same command line, which must not be
    swept as well. Raises UsageError for a text that is no assignment, a name that the study does
    not know, a value that its setting does not take, and whatever is said twice.
    """
    if not (sweeps or parameters):
        return study
    swept = _assignments("--sweep", sweeps, "V1,V2")
    single = _assignments("--parameter", parameters, "VALUE")
    if not study.command:
        return _with_settings(study, swept, single, given)
    for name in single:
        if name in swept:
            raise UsageError(f"{name}: give --parameter or --sweep, not both")
    _check_names(study, [*swept, *single], [*swept.values(), *single.values()])
    kept = {k: v for k, v in study.sweep.items() if k not in single}
    more = {k: _values(k, text, _plain) for k, text in swept.items()}
    own = {**study.parameters, **{k: _plain(k, text) for k, text in single.items()}}
    return replace(study, parameters=own, sweep={**kept, **more})


def _with_settings(
    study: Study, swept: Mapping[str, str], single: Mapping[str, str], given: Collection[str]
) -> Study:
    """A study of jobkit's own training, whose sweeps are of its settings."""
    if single:
        name = next(iter(single))
        raise UsageError(
            f"--parameter {name}: is of a command; a setting of the training has its own option"
        )
    sweep: dict[str, Any] = {}
    for word, text in swept.items():
        name = word.replace("-", "_")
        check_keys({name: text})
        if name in sweep:
            raise UsageError(f"--sweep {name}: given twice, also as {word}")
        if name in given:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{name}: give {option} or --sweep, not both")
        sweep[name] = _values(name, text, _setting)
    fixed = {k: v for k, v in overridden(study.settings, sweep).items() if k not in sweep}
    fixed |= {k: v for k, v in study.settings.items() if k in given}
    return replace(study, settings=fixed, sweep=overridden(study.sweep, sweep))


def _assignments(option: str, words: Sequence[str], what: str) -> dict[str, str]:
    """The words NAME=TEXT, by name."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise UsageError(f"{option} {word!r}: must be NAME={what}")
        if name in found:
            raise UsageError(f"{option} {name}: given twice")
        found[name] = text
    return found


def _values(name: str, text: str, typed: Any) -> tuple[Value, ...]:
    """The values between the commas, each once."""
    found: list[Value] = []
    for part in text.split(","):
        if not part.strip():
            raise UsageError(f"--sweep {name}={text}: has an empty value")
        value = typed(name, part.strip())
        if value in found:
            raise UsageError(f"--sweep {name}={text}: has {part.strip()} twice")
        found.append(value)
    return tuple(found)


def _plain(_name: str, text: str) -> Value:
    """A value as TOML has it: a number, true or false, else a string."""
    if text in _BOOLS:
        return _BOOLS[text]
    if re.fullmatch(r"[+-]?\d{1,15}", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d{1,15}(\.\d+)?([eE][+-]?\d{1,2})?", text):
        return float(text)
    return text


def _setting(name: str, text: str) -> Value:
    """A value of a setting. Raises UsageError that says what it may be."""
    plain, _ = plain_type(name)
    try:
        value: Any = _BOOLS[text] if plain is bool else plain(text)
    except (KeyError, ValueError):
        value = text  # its check says what it must be
    checked: Value = check_value(name, value)
    return checked


def _check_names(study: Study, names: Sequence[str], texts: Sequence[str]) -> None:
    """Raise UsageError for a name without a placeholder: its values would change nothing."""
    places = [*study.command, *study.parameters.values(), *texts, study.work.get("per_step")]
    known = set[str]().union(study.parameters, study.sweep, *map(used, places))
    for name in names:
        if name not in known:
            raise UsageError(
                f"parameter {name}: no {{{name}}} in the command{nearest(name, known)}"
            )
