"""Study and Plan: the grid of runs to compare, checked and saved before the first job starts.

A study is a TOML file:

    name = "strong"
    strategies = ["ddp", "fsdp"]
    gpus = [1, 2, 4, "2x4"]      # ranks in all, or NODESxRANKS
    repeats = 3
    seed = 0                     # shuffles the order of the runs
    [settings]                   # any setting of RunSpec, the same in every run
    epochs = 5
    [sweep]                      # any setting of RunSpec, one run for each value
    precision = ["fp32", "bf16"]
"""

import itertools
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.files import read_text
from jobkit.paths import (
    REPOSITORY,
    StudyPaths,
    check_name,
    closed_to_others,
    find_named,
    write_whole,
)
from jobkit.spec.runspec import ONE_RANK, SETTINGS, STRATEGIES, RunSpec, check_keys

STUDIES = REPOSITORY / "hpc" / "studies"
PLAN_VERSION = 1
_SET_BY_THE_GRID = ("strategy", "nodes", "ranks_per_node", "repeat")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is to be compared. Raises UsageError for a value that cannot be used."""

    name: str
    description: str = ""
    strategies: tuple[str, ...] = ("ddp", "fsdp")
    gpus: tuple[int | str, ...] = (1, 2, 4)
    gpus_per_node: int | None = None  # None: all ranks of a plain number share one node
    repeats: int = 1
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("study name", self.name)
        per_node = self.gpus_per_node
        if per_node is not None and (type(per_node) is not int or per_node < 1):
            raise UsageError(f"gpus_per_node = {per_node!r}: must be a whole number, 1 or more")
        for name in ("strategies", "gpus"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not values:
                raise UsageError(f"{name} = {values!r}: must be a list with at least one value")
            if any(isinstance(value, list | dict) for value in values):
                raise UsageError(f"{name} = {values!r}: a list of lists or tables says nothing")
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        for strategy in self.strategies:
            one_of("strategy", strategy, STRATEGIES)
        for name, low in (("repeats", 1), ("seed", 0)):
            if type(getattr(self, name)) is not int or getattr(self, name) < low:
                raise UsageError(
                    f"{name} = {getattr(self, name)!r}: must be a whole number, {low} or more"
                )
        for table in (self.settings, self.sweep):
            if not isinstance(table, Mapping):
                raise UsageError(f"[settings] and [sweep] are tables, not {table!r}")
            check_keys(table)
            for key in _SET_BY_THE_GRID:
                if key in table:
                    raise UsageError(
                        f"'{key}' is not a setting of a study: use strategies, gpus, repeats"
                    )
        for key, values in self.sweep.items():
            if not isinstance(values, list | tuple) or not values:
                raise UsageError(
                    f"sweep {key} = {values!r}: must be a list with at least one value"
                )

    @classmethod
    def load(cls, source: str | Path, **overrides: Any) -> "Study":
        """Read a study from a TOML file, or by its bare name from hpc/studies.

        Overrides replace a study's field of that name, or else a setting of the training.
        Raises UsageError for a missing or broken file or an unknown key.
        """
        values = _read_toml(find_named("study", source, STUDIES))
        known = tuple(cls.__dataclass_fields__)
        for key in values:
            if key not in known:
                raise UsageError(
                    f"{source}: unknown key '{key}'{nearest(key, (*known, *SETTINGS))}"
                )
        values["name"] = overrides.pop("name", values.get("name", Path(source).stem))
        try:
            return cls(**values).changed(**overrides)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    def changed(self, **overrides: Any) -> "Study":
        """The study with some fields or settings replaced; a replaced setting is swept no more."""
        own = {k: v for k, v in overrides.items() if k in self.__dataclass_fields__}
        rest = {k: v for k, v in overrides.items() if k not in own}
        check_keys(rest)
        settings = {**self.settings, **rest}
        # One replaces the other: a batch given here must not meet the file's other kind of batch.
        for one, other in itertools.permutations(("global_batch_size", "batch_size_per_rank")):
            if one in rest and other not in rest:
                settings.pop(other, None)
        sweep = {k: v for k, v in self.sweep.items() if k not in rest}
        return replace(self, **{"settings": settings, "sweep": sweep, **own})

    def sizes(self) -> list[tuple[int, int]]:
        """Each size as (nodes, ranks on each node)."""
        return [_size(gpus, self.gpus_per_node) for gpus in self.gpus]

    def expand(self) -> "Plan":
        """Make the plan: every run of the grid once, in an order shuffled by the seed."""
        runs: dict[str, RunSpec] = {}
        notes: list[str] = []
        points = [
            dict(zip(self.sweep, p, strict=True)) for p in itertools.product(*self.sweep.values())
        ]
        for strategy, (nodes, ranks) in itertools.product(self.strategies, self.sizes()):
            if strategy in ONE_RANK and nodes * ranks > 1:
                notes.append(f"{strategy} runs at 1 rank only: not planned at {nodes * ranks}")
                continue
            for point, repeat in itertools.product(points, range(self.repeats)):
                shape = {"strategy": strategy, "nodes": nodes, "ranks_per_node": ranks}
                spec = self._spec({**self.settings, **point, **shape, "repeat": repeat})
                runs[spec.run_id] = spec
        if not runs:
            raise UsageError("the study plans no run: single and dp need a size of 1")
        order = sorted(runs)
        random.Random(self.seed).shuffle(order)
        return Plan(study=self, runs={run_id: runs[run_id] for run_id in order}, notes=tuple(notes))

    def _spec(self, values: Mapping[str, Any]) -> RunSpec:
        """One run of the grid; UsageError names the study."""
        try:
            return RunSpec(**values)
        except UsageError as error:
            raise UsageError(f"study {self.name}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a study, by run_id, in the order in which they start."""

    study: Study
    runs: Mapping[str, RunSpec]
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
            content = json.loads(read_text(path, 64 << 20))
            study = Study(**content["study"])
            runs = {
                check_name("run id", r["run_id"]): RunSpec.from_dict(r["spec"])
                for r in content["runs"]
            }
            notes = tuple(content["notes"])
            return cls(study=study, runs=runs, notes=notes, folder=path.parent)
        except FileNotFoundError:
            raise UsageError(f"no plan at {path}") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{path} is not a plan: {error}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib  # here, because the payload imports this package on Python 3.10 too

    try:
        return tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _size(gpus: int | str, per_node: int | None) -> tuple[int, int]:
    """A size as (nodes, ranks a node): 8 on nodes of 4 is (2, 4); "2x3" is (2, 3)."""
    if isinstance(gpus, str) and (match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", gpus)):
        return int(match[1]), int(match[2])
    if isinstance(gpus, str) and re.fullmatch(r"[1-9]\d{0,6}", gpus):
        gpus = int(gpus)
    if type(gpus) is not int or gpus < 1:
        raise UsageError(f"gpus {gpus!r}: must be a whole number, 1 or more, or NODESxRANKS as 2x4")
    if per_node is None or gpus <= per_node:
        return 1, gpus
    if gpus % per_node:
        raise UsageError(f"gpus {gpus}: does not fill nodes of {per_node}; say NODESxRANKS, as 2x3")
    return gpus // per_node, per_node
