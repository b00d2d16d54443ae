"""How to reproduce a study: its file, its commands, its settings and versions."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from jobkit.analysis.collect.results import Results
from jobkit.analysis.tables.text import counted
from jobkit.errors import UsageError
from jobkit.paths import read_json
from jobkit.spec.runspec import SETTINGS
from jobkit.spec.study import Study

_VERSIONS = (
    "device",
    "device_type",
    "backend",
    "torch_version",
    "python_version",
    "cuda_version",
    "hip_version",
    "nccl_version",
    "cudnn_version",
    "cudnn_benchmark",
    "driver_version",
    "threads_used",
    "parameters",
    "train_samples",
    "test_samples",
    "node_list",
    "git_commit",
)
_SHOWN = 6  # different values of a column
_IN_TABLES = ("nodes", "ranks_per_node", "repeat", "epochs", "batch_size_per_rank")


def study_file(results: Results) -> str:
    """The study as a TOML file that plans the same runs; empty where there is no plan."""
    if not (study := _planned_study(results)):
        return ""
    plain = {k: v for k, v in study.items() if not isinstance(v, Mapping)}
    tables = {k: v for k, v in study.items() if isinstance(v, Mapping) and v}
    text = [*_not_planned(results, study), *_lines(plain)]
    for name, table in tables.items():
        text += ["", f"[{name}]", *_lines(table)]
    return "\n".join(text)


def _planned_study(results: Results) -> dict[str, Any]:
    """The study in the plan; empty where there is none."""
    study = (read_json(results.paths.plan) or {}).get("study")
    return study if isinstance(study, dict) else {}


def _not_planned(results: Results, study: Mapping[str, Any]) -> list[str]:
    """A comment on the runs that calls with other values planned before, under the same name."""
    try:
        planned = Study(**study).expand().runs
    except (UsageError, TypeError):  # of an older version
        return []
    others, total = sum(r not in planned for r in results.runs["run_id"]), len(results.runs)
    if others in (0, total):  # all: of an older version, which had other defaults
        return []
    of = counted(total, "run")
    return [f"# Without {others} of the {of}, which calls with other values planned before."]


def commands(results: Results, options: Sequence[str] = ()) -> str:
    """The commands that run the study again and make this report; options: of plot_results.py."""
    name = shlex.quote(results.name)
    lines = [f"python run_benchmarks.py --study {name}.toml"] if _planned_study(results) else []
    lines.append(f"python collect_results.py {name}")
    return "\n".join([*lines, " ".join(["python plot_results.py", name, *options])])


def facts(results: Results) -> list[tuple[str, str]]:
    """Settings and versions with their values; where runs differ, the values and their counts."""
    settings = ("epochs_planned", *SETTINGS)
    names = [n for n in settings if n in results.runs and n not in _IN_TABLES]
    found = [(name, _values(results.runs[name])) for name in dict.fromkeys((*_VERSIONS, *names))]
    return [(name.replace("_", " "), text) for name, text in found if text]


def _values(column: "pd.Series[Any]") -> str:
    counts = column.dropna().value_counts(sort=False)
    if len(counts) == 1:
        return f"{counts.index[0]}"
    shown = sorted(f"{value} ({counted(count, 'run')})" for value, count in counts.items())
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _lines(table: Mapping[str, Any]) -> list[str]:
    """Keys and values as TOML has them."""
    return [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _value(value: Any) -> str:
    """A value in TOML's words, which JSON's are but for numbers that are not finite."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
