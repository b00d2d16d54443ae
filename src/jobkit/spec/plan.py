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
"""

import itertools
import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.files import MOST_TOML, load_json, load_toml, read_regular, read_text
from jobkit.paths import REPOSITORY, StudyPaths, check_name, find_named, write_whole
from jobkit.permissions import closed_to_others
from jobkit.spec.runspec import ONE_RANK, SETTINGS, STRATEGIES, RunSpec, check_keys, overridden
from jobkit.spec.setting import check_fields, setting

STUDIES = REPOSITORY / "hpc" / "studies"
PLAN_VERSION = 1
_MOST_RUNS = 100_000  # of a study: more are a mistake, and would fill the memory first
_MOST_BYTES = 32 << 20  # of a plan.json
_SET_BY_THE_GRID = ("strategy", "nodes", "ranks_per_node", "repeat")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is to be compared. Raises UsageError for a value that cannot be used."""

    name: str
    description: str = setting("", "purpose of the study", multiline=True)
    strategies: tuple[str, ...] = setting(("ddp", "fsdp"), "strategies to compare", low=1)
    gpus: tuple[int | str, ...] = setting((1, 2, 4), "sizes: total ranks, or NODESxRANKS", low=1)
    gpus_per_node: int | None = setting(
        None, "ranks on a full node (default: all ranks of a plain number share one node)", low=1
    )
    repeats: int = setting(1, "repeats of each setting", low=1)
    seed: int = setting(0, "seed of the order of the runs", low=0)
    settings: Mapping[str, Any] = setting({}, "settings of RunSpec, the same in every run")
    sweep: Mapping[str, tuple[Any, ...]] = setting(
        {}, "settings of RunSpec, one run per value", low=1
    )

    def __post_init__(self) -> None:
        check_name("study name", self.name)
        check_fields(self)
        for name in ("strategies", "gpus"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
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
        settings = overridden(self.settings, rest)
        sweep = {k: v for k, v in overridden(self.sweep, rest).items() if k not in rest}
        return replace(self, **{"settings": settings, "sweep": sweep, **own})

    def sizes(self) -> list[tuple[int, int]]:
        """Each size as (nodes, ranks on each node)."""
        return [_size(gpus, self.gpus_per_node) for gpus in self.gpus]

    def expand(self) -> "Plan":
        """Make the plan: every run of the grid once, in an order shuffled by the seed."""
        counts = [
            len(self.strategies),
            len(self.gpus),
            self.repeats,
            *map(len, self.sweep.values()),
        ]
        if (count := math.prod(counts)) > _MOST_RUNS:
            raise UsageError(f"study {self.name}: {count:,} runs, more than {_MOST_RUNS:,}")
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
            raise UsageError("the study has no run: single and dp need a size of 1")
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
            content = load_json(read_regular(path, _MOST_BYTES))
            study = Study(**content["study"])
            runs = {
                check_name("run id", r["run_id"]): RunSpec.from_dict(r["spec"])
                for r in content["runs"]
            }
            notes = tuple(content["notes"])
            return cls(study=study, runs=runs, notes=notes, folder=path.parent)
        except FileNotFoundError:
            raise UsageError(f"no plan at {path}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not a plan: {error}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return load_toml(read_text(path, MOST_TOML))
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _size(gpus: int | str, per_node: int | None) -> tuple[int, int]:
    """A size as (nodes, ranks per node): 8 on nodes of 4 is (2, 4); "2x3" is (2, 3)."""
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
