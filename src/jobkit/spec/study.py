"""Study and Plan: the grid of runs to compare, checked and saved before the first job starts.

A study is a TOML file: docs/studies.md has one of jobkit's own training, own-program.md of others.
"""

import contextlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.files import file_names, is_there, read_regular, read_toml
from jobkit.paths import (
    REPOSITORY,
    StudyPaths,
    check_name,
    find_named,
    logs_root,
    read_json,
    short_path,
    write_json,
)
from jobkit.permissions import closed_to_others
from jobkit.spec.command import (
    RUN_DIR,
    SCALINGS,
    CommandSpec,
    PlannedRun,
    ProgramOptions,
    Value,
    check_parameter,
    check_starter,
    fill,
    program_name,
    resolve,
    used,
)
from jobkit.spec.runspec import ONE_RANK, SETTINGS, STRATEGIES, RunSpec, check_keys, overridden
from jobkit.spec.settings import check_fields, setting
from jobkit.spec.strategies import owners

STUDIES = REPOSITORY / "hpc" / "studies"
PLAN_VERSION = 1
_SIZE_NAMES = ("ranks", "nodes", "ranks_per_node", "repeat")
_MAX_PLAN = 32 << 20  # bytes of a plan.json
_MAX_RUNS = 100_000  # of a study: more are a mistake, and would fill the memory first
_SET_BY_THE_GRID = ("strategy", "nodes", "ranks_per_node", "repeat")
_DEFAULT_STRATEGIES = ("ddp", "fsdp")
_FOLDERS = ("single", "comm")  # of single jobs, under logs/
_FILES = ("plan.json", "logs.json")  # a study's folder has one of them
_WORK = ("unit", "per_step", "scaling", "together")
_SHARED = tuple(f.name for f in fields(ProgramOptions))
_OF_COMMANDS = ("parameters", "work", *_SHARED)  # what only a study of a command has


@dataclass(frozen=True, kw_only=True)
class Study(ProgramOptions):
    """What is to be compared. Raises UsageError for a value that cannot be used."""

    name: str
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
    parameters: Mapping[str, Any] = setting({}, "command: values of its placeholders")
    work: Mapping[str, Any] = setting({}, "command: unit, per_step, scaling and together")

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
        if self.pattern and ("/" in self.pattern or self.pattern.endswith(".toml")):
            # Who collects the study may be in another folder.
            object.__setattr__(self, "pattern", str(Path(self.pattern).absolute()))
        for name in self.settings:
            raise UsageError(
                f"--{name.replace('_', '-')} is a setting of jobkit's own training: a command has "
                "its options in its own words, and its values in [parameters]"
            )
        for name, value in [*self.parameters.items(), *self._swept()]:
            check_parameter(name, value)
            if name in (*_SIZE_NAMES, "run_dir"):
                raise UsageError(f"parameter {name}: this name is the size's; choose another")
        for key in self.work:
            one_of("key of work", key, _WORK)
        if "scaling" in self.work:
            one_of("scaling", self.work["scaling"], SCALINGS)
        if "per_step" in self.work and not self.work.get("unit"):
            what = '--unit images, or unit = "images" in the study'
            raise UsageError(f"work: per_step needs its unit: {what}")

    def _check_training(self) -> None:
        for key in _OF_COMMANDS:
            if getattr(self, key) not in (self.__dataclass_fields__[key].default, {}):
                raise UsageError(f"'{key}' is of a study of a command: give command = [...]")
        if not self.strategies:
            raise UsageError("strategies = []: must be a list of strings, 1 or more")
        for strategy in self.strategies:
            one_of("strategy", strategy, STRATEGIES)
        for key in (*self.settings, *self.sweep):
            check_keys([key])
            if key in _SET_BY_THE_GRID:
                raise UsageError(f"'{key}' is no setting of a study: use strategies, gpus, repeats")

    @classmethod
    def load(cls, source: str | Path, **overrides: Any) -> "Study":
        """Read a study from a TOML file, or by its bare name from hpc/studies.

        Overrides replace a study's field of that name, or else a setting of the training.
        Raises UsageError for a missing or invalid file, or an unknown key.
        """
        path = find_named("study", source, STUDIES)
        values, known = read_toml(path), cls.__dataclass_fields__
        if "command" in overrides and "command" not in values:
            raise UsageError(
                f"{source} is a study of jobkit's own training: for a command leave out --study"
            )
        try:
            for key in (key for key in values if key not in known):
                if key not in SETTINGS:
                    raise UsageError(f"unknown key '{key}'{nearest(key, (*known, *SETTINGS))}")
                raise UsageError(f"'{key}' is a setting of the training: write it under [settings]")
            if values.get("command") == []:
                raise UsageError("command = []: its first word is the program")
            values["name"] = overrides.pop("name", values.get("name", path.stem))
            return cls(**values).changed(**overrides)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    @classmethod
    def of_command(cls, command: Sequence[str], **fields: Any) -> "Study":
        """A study of a command, called after its program where no name is given."""
        name = fields.pop("name", None) or program_name(command)
        if name in _FOLDERS:
            name += "-study"
        return cls(name=name, command=tuple(command)).changed(**fields)

    def changed(self, **overrides: Any) -> "Study":
        """The study with some fields or settings replaced; a replaced setting is swept no more."""
        fields = {k: v for k, v in overrides.items() if k in self.__dataclass_fields__}
        if not (self.command or "command" in fields):
            fields.pop("why", None)  # which is a setting too
        if "work" in fields:
            fields["work"] = {**self.work, **fields["work"]}
        rest = {k: v for k, v in overrides.items() if k not in fields}
        check_keys(rest)
        settings = overridden(self.settings, rest)
        sweep = {k: v for k, v in overridden(self.sweep, rest).items() if k not in rest}
        return replace(self, **{"settings": settings, "sweep": sweep, **fields})

    def sizes(self) -> list[tuple[int, int]]:
        """Each size as (nodes, ranks on each node)."""
        return [size_of(gpus, self.gpus_per_node) for gpus in self.gpus]

    def expand(self) -> "Plan":
        """Make the plan: every run of the grid once, in an order shuffled by the seed."""
        lengths = [len(self.strategies) or 1, len(self.gpus), self.repeats]
        if (count := math.prod([*lengths, *map(len, self.sweep.values())])) > _MAX_RUNS:
            raise UsageError(f"study {self.name}: {count:,} runs, more than {_MAX_RUNS:,}")
        notes: list[str] = []
        specs = self._commands() if self.command else self._trainings(notes)
        runs = {spec.run_id: spec for spec in specs}
        if not runs:
            raise UsageError("the study has no run: single and dp need a size of 1")
        order = sorted(runs)
        random.Random(self.seed).shuffle(order)
        return Plan(study=self, runs={run_id: runs[run_id] for run_id in order}, notes=tuple(notes))

    def _points(self) -> list[dict[str, Any]]:
        """Each combination of the values of the sweep."""
        values = itertools.product(*self.sweep.values())
        return [dict(zip(self.sweep, point, strict=True)) for point in values]

    def _swept(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, values in self.sweep.items() for value in values)

    def _trainings(self, notes: list[str]) -> Iterator[PlannedRun]:
        """Each run of jobkit's own training; what is not planned is noted."""
        points = self._points()
        for strategy, (nodes, ranks) in itertools.product(self.strategies, self.sizes()):
            if strategy in ONE_RANK and nodes * ranks > 1:
                notes.append(f"{strategy} runs at 1 rank only: not planned at {nodes * ranks}")
                continue
            for point, repeat in itertools.product(points, range(self.repeats)):
                # What another strategy alone has makes no second run of the same.
                swept = {k: v for k, v in point.items() if strategy in (owners(k) or [strategy])}
                shape = {"strategy": strategy, "nodes": nodes, "ranks_per_node": ranks}
                yield RunSpec(**{**self.settings, **swept, **shape, "repeat": repeat})

    def _commands(self) -> Iterator[PlannedRun]:
        """Each run of a command. Raises UsageError where per_step contradicts scaling."""
        texts = [*self.command, *self.parameters.values(), self.work.get("per_step")]
        known = set[str]().union(*map(used, [*texts, *(value for _, value in self._swept())]))
        for name in self.sweep:
            if name not in known:
                hint = nearest(name, known)
                raise UsageError(f"sweep {name}: no {{{name}}} in the command{hint}")
        for point in self._points():
            parameters = {**self.parameters, **point}
            scaling = self._scaling([self._run(parameters, size) for size in self.sizes()])
            for size, repeat in itertools.product(self.sizes(), range(self.repeats)):
                yield self._run(parameters, size, repeat, scaling)

    def _run(
        self,
        parameters: Mapping[str, Any],
        size: tuple[int, int],
        repeat: int = 0,
        scaling: str | None = None,
    ) -> CommandSpec:
        """The run of a command at a size, with its placeholders replaced."""
        ranks = math.prod(size)
        place: dict[str, Any] = {"nodes": size[0], "ranks_per_node": size[1], "repeat": repeat}
        names: dict[str, Value] = {"ranks": ranks, **place, "run_dir": RUN_DIR}
        try:
            values = {name: _resolved(name, parameters[name], names) for name in parameters}
            names |= values
            by_size = [name for name in parameters if used(parameters[name]) & {*_SIZE_NAMES}]
            command = tuple(fill(word, names) for word in self.command)
            check_starter(command, self.launcher, ranks)
            return CommandSpec(
                **{name: getattr(self, name) for name in _SHARED},
                command=command,
                **place,
                parameters=values,
                by_size=tuple(by_size),
                template=(*self.command, *(f"{name}={parameters[name]}" for name in by_size)),
                unit=self.work.get("unit"),
                work_per_step=_work_per_step(self.work.get("per_step"), names),
                scaling=scaling,
                together=self.work.get("together", False),
            )
        except UsageError as error:
            raise UsageError(f"at {ranks} rank{'s' * (ranks > 1)}: {error}") from None

    def _scaling(self, series: Sequence[CommandSpec]) -> str | None:
        """Whether the work of a step stays or grows with the ranks; None: neither, or not said."""
        stated: str | None = self.work.get("scaling")
        work = {s.world_size: s.work_per_step for s in series if s.work_per_step is not None}
        if len(work) < 2:
            return stated
        (first, least), *others = work.items()
        seen = "strong" if all(w == least for _, w in others) else None
        if all(w * first == least * ranks for ranks, w in others):
            seen = "weak"
        if stated and stated != seen:
            values = ", ".join(f"{w:g} at {n} ranks" for n, w in work.items())
            wanted = "the same at each size" if stated == "strong" else "in proportion to the ranks"
            raise UsageError(
                f"work: scaling is {stated}, so per_step must be {wanted}; it is {values}"
            )
        return seen

    def to_dict(self) -> dict[str, Any]:
        """The fields of its kind, as JSON takes them."""
        other = ("strategies", "settings") if self.command else ("command", *_OF_COMMANDS)
        return {n: getattr(self, n) for n in self.__dataclass_fields__ if n not in other}


def size_of(gpus: int | str, per_node: int | None) -> tuple[int, int]:
    """A size as (nodes, ranks per node): 8 on nodes of 4 is (2, 4); "2x3" is (2, 3)."""
    text = str(gpus)
    match = re.fullmatch(r"(?:([1-9]\d{0,5})x)?([1-9]\d{0,6})", text)
    if not match:
        hint = ""
        if re.fullmatch(r"\d+([,-]\d+)+,?", text):
            hint = f"; separate sizes by spaces: --gpus {' '.join(re.findall('[0-9]+', text))}"
        elif re.match(r"[A-Za-z./]", text):
            hint = "; a command comes after --, as: --gpus 1 2 -- python train.py"
        raise UsageError(
            f"gpus {gpus!r}: must be a whole number, 1 or more, or NODESxRANKS as 2x4{hint}"
        )
    ranks = int(match[2])
    if match[1] or per_node is None or ranks <= per_node:
        return int(match[1] or 1), ranks
    if ranks % per_node:
        raise UsageError(f"gpus {gpus}: does not fill nodes of {per_node}; say NODESxRANKS, as 2x3")
    return ranks // per_node, per_node


def _resolved(name: str, value: Any, names: Mapping[str, Value]) -> Value:
    """The value of a parameter. Raises UsageError that names it."""
    try:
        return resolve(value, names)
    except UsageError as error:
        raise UsageError(f"parameter {name}: {error}") from None


def _work_per_step(stated: Any, names: Mapping[str, Value]) -> float | None:
    if stated is None:
        return None
    value = resolve(stated, names)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if 0 < float(value) < 1e18 and value is not True:
            return float(value)
    raise UsageError(f"work: per_step = {stated!r}: must be a number above 0, or a placeholder")


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

    def continued(self) -> "Plan":
        """The plan as it goes on with that in its folder: with its stated work, and with notes."""
        if not is_there(self.paths.plan):
            return self
        before, plan, notes = Plan.read(self.paths.plan), self, list(self.notes)
        stated = before.study.work if before.study.command == self.study.command else {}
        if stated and not self.study.work:
            plan = replace(self.study, work=stated).expand()
            words = ", ".join(f"{name} {value}" for name, value in stated.items())
            notes.append(f"the work of the command is that stated before: {words}")
        if others := len(before.runs.keys() - plan.runs.keys()):
            has = f"{short_path(self.paths.folder)} has {others} other run{'s' * (others > 1)}"
            notes.append(f"{has}, to be compared with these; for a new folder say --name NAME")
        return replace(plan, notes=tuple(notes))

    @closed_to_others()
    def save(self) -> None:
        """Write plan.json, whole. Runs planned before under this name stay planned."""
        before = Plan.read(self.paths.plan).runs if self.paths.plan.exists() else {}
        runs = [{"run_id": k, "spec": s.to_dict()} for k, s in {**before, **self.runs}.items()]
        content = {"v": PLAN_VERSION, "study": self.study.to_dict(), "notes": self.notes}
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.paths.plan, {**content, "runs": runs})

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read plan.json; raises UsageError when it is absent or not a plan."""
        try:
            content = json.loads(read_regular(path, _MAX_PLAN, follow=False))
            study = Study(**content["study"])
            runs = {
                check_name("run id", r["run_id"]): read_spec(r["spec"]) for r in content["runs"]
            }
            return cls(study=study, runs=runs, notes=tuple(content["notes"]), folder=path.parent)
        except FileNotFoundError:
            raise UsageError(f"no plan at {path}") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{path} is not a plan: {error}") from None


def read_spec(values: Mapping[str, Any]) -> RunSpec | CommandSpec:
    """The spec in spec.json, or in a plan. Raises UsageError."""
    return CommandSpec.from_dict(values) if "command" in values else RunSpec.from_dict(values)


def find_study(source: str | Path | None = None, *, planned: bool = False) -> Path:
    """The folder of a study, by its path or bare name; the newest one when none is given.

    planned: the newest of those with a plan: a list of logs has no runs to look at or to end.
    Raises UsageError that names the nearest study where there is none.
    """
    if source is None:
        if plans := [path for path in _plans() if path.name == "plan.json" or not planned]:
            return max(plans, key=lambda path: path.stat().st_mtime).parent
        single = logs_root() / "single"
        hint = f"; single runs are in {single}: name that" if single.is_dir() else ""
        raise UsageError(f"no study in {logs_root()}: start one with run_benchmarks.py{hint}")
    text, named = str(source), logs_root() / str(source)
    bare = text not in ("", ".", "..") and "/" not in text
    try:
        folder = named if bare and named.is_dir() else Path(text)
        if folder.is_file():
            raise UsageError(f"{text} is a file: give the study's folder")
        if not text or not folder.is_dir():
            known = sorted({p.parent.name for p in _plans()})
            shown = f" (in {logs_root()}: {', '.join(known)})" if known else f" in {logs_root()}"
            raise UsageError(f"no study {text!r}{nearest(folder.name, known)}{shown}")
    except OSError as error:  # too long for a name, or in a folder that is closed
        raise UsageError(f"no study {text!r}: {error.strerror}") from None
    if any(is_there(folder / name) for name in _FILES):
        return folder
    if is_run(folder):
        parent = folder.absolute().parent
        raise UsageError(f"{text} is the folder of one run: name its study, {parent}")
    if not run_folders(folder):
        raise UsageError(f"{text} has no plan.json and no run: it is not a study")
    return folder


def read_plan(folder: Path) -> Plan:
    """The plan of a study's folder or, where single jobs have none, that of the runs in it.

    Raises UsageError where a plan cannot be read, and where there is neither.
    """
    if is_there(folder / "plan.json"):
        return Plan.read(folder / "plan.json")
    unknown = CommandSpec(command=("unknown",))  # of a job that ended before it left its settings
    runs = {check_name("run id", f.name): read_run_spec(f) or unknown for f in run_folders(folder)}
    if not runs:
        raise UsageError(f"{folder} has no plan.json and no run")
    return Plan(study=Study(name="single"), runs=runs, folder=folder)


def read_run_spec(folder: Path) -> PlannedRun | None:
    """The spec that lies in a run's folder, where this version can read it."""
    try:
        return read_spec((read_json(folder / "spec.json") or {})["spec"])
    except (KeyError, TypeError, AttributeError, UsageError):
        return None


def _plans() -> list[Path]:
    """What every study has that can be seen: its plan, or the list of its logs."""
    plans = (logs_root() / name / file for name in file_names(logs_root()) for file in _FILES)
    return [path for path in plans if is_there(path)]


def is_run(folder: Path) -> bool:
    """Whether a folder is one of a run: something of a run lies in it."""
    return not {"spec.json", "job.json", "metrics", "train.log"}.isdisjoint(file_names(folder))


def run_folders(folder: Path) -> list[Path]:
    """The folders of runs in a study's folder, by name."""
    return [f for n in sorted(file_names(folder)) if is_run(f := folder / n)]
