"""Copies of a program are no scaling: what says that ranks worked together, and what follows."""

import json
from pathlib import Path

import pandas as pd
import pytest

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.rows import ranks_together
from jobkit.analysis.tables.series import SAME, faults
from jobkit.paths import RunPaths
from jobkit.spec.command import CommandSpec
from jobkit.spec.runspec import RunSpec

TWO = {"command": ("python", "train.py"), "ranks_per_node": 2}


@pytest.mark.parametrize(
    ("planned", "group_size", "seen", "evidence"),
    [
        ({}, 2, "none", "process group"),
        ({}, 1, "none", "none"),
        ({}, None, "none", "none"),
        ({}, None, "shared memory", "shared memory"),
        ({}, None, None, None),
        ({"together": True}, None, "none", "stated"),
        ({"launcher": "once"}, None, "none", None),
        ({"ranks_per_node": 1}, None, "none", None),
    ],
)
def test_the_best_evidence_counts(
    planned: dict[str, object], group_size: int | None, seen: str | None, evidence: str | None,
    tmp_path: Path,
) -> None:  # fmt: skip
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    paths.job.write_text(json.dumps({"ranks_together": seen}))
    start = {"v": 1, "kind": "run_start", "attempt": 0, "group_size": group_size}
    records = RunRecords(records=[start])
    assert ranks_together(paths, records, CommandSpec(**(TWO | planned))) == evidence
    assert ranks_together(paths, records, RunSpec(ranks_per_node=2)) is None


def test_a_series_of_copies_is_not_compared_and_its_neighbour_is() -> None:
    empty = dict.fromkeys((*SAME, "scaling", "global_batch_size", "batch_size_per_rank"))
    rows = [
        {"series": s, "strategy": s, "status": "ok", "world_size": n, "ranks_together": seen}
        for s, seen_at_4 in (("copied", "none"), ("ddp", "connection"), ("short", None))
        for n, seen in ((1, None), (4, seen_at_4))
    ]
    found = faults(pd.DataFrame([row | empty for row in rows]))
    assert list(found) == ["copied"]
    assert found["copied"].startswith("4 copies: nothing shows that the ranks worked together")
