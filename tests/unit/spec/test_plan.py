"""Studies and plans: the file, the grid, its order, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.spec.study import Plan, Study


def load(folder: Path, text: str, **changes: Any) -> Study:
    (folder / "my.toml").write_text(text)
    return Study.load(folder / "my.toml", **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "my.toml: not valid TOML: "),
        ("gpu = [1]", "my.toml: unknown key 'gpu'; did you mean 'gpus'?"),
        ("epochs = 3", "'epochs' is a setting of the training: write it under [settings]"),
        ("[sweep]\nprecison = ['fp32']", "my.toml: unknown setting 'precison'; did you mean"),
        ("[sweep]\nprecision = 'fp32'", "sweep precision = 'fp32': must be a list"),
        ("[sweep]\nprecision = []", "must be a list of values, 1 or more"),
        ("[settings]\nnodes = 2", "'nodes' is not a setting of a study"),
        ("command = []", "my.toml: command = []: its first word is the program"),
        ("repeats = 10000000", "60,000,000 runs, more than 100,000"),
        ("strategies = []", "strategies = []: must be a list of strings, 1 or more"),
        ("repeats = 0", "repeats = 0: must be a whole number, 1 or more"),
        ("name = '../x'", "study name '../x': use letters"),
        ("gpus = [0]", "gpus 0: must be a whole number, 1 or more, or NODESxRANKS"),
        ("gpus = ['2x']", "gpus '2x': must be"),
        ("gpus = [6]\ngpus_per_node = 4", "gpus 6: does not fill nodes of 4"),
        ("strategies = ['single']\ngpus = [2]", "the study has no run"),
    ],
)
def test_a_study_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text).expand()
    assert message in str(caught.value)


def test_sizes_are_ranks_or_nodes_by_ranks() -> None:
    study = Study(name="s", gpus=(1, 8, "2x3", "4"), gpus_per_node=4)
    assert study.sizes() == [(1, 1), (2, 4), (2, 3), (1, 4)]
    assert Study(name="s", gpus=(8,)).sizes() == [(1, 8)]


def test_single_is_planned_at_one_rank_only_and_that_is_said() -> None:
    plan = Study(name="s", strategies=("single", "ddp"), gpus=(1, 2)).expand()
    found = sorted((s.strategy, s.world_size) for s in plan.runs.values())
    assert found == [("ddp", 1), ("ddp", 2), ("single", 1)]
    assert plan.notes == ("single runs at 1 rank only: not planned at 2",)


def test_a_sweep_makes_a_run_for_each_value_and_repeat() -> None:
    sweep = {"precision": ("fp32", "bf16"), "lr": (0.1, 0.2)}
    plan = Study(name="s", strategies=("ddp",), gpus=(1,), repeats=2, sweep=sweep).expand()
    points = sorted((s.precision, s.lr, s.repeat) for s in plan.runs.values())
    assert points == [(p, x, r) for p in ("bf16", "fp32") for x in (0.1, 0.2) for r in (0, 1)]
    assert all(run_id == spec.run_id for run_id, spec in plan.runs.items())
    twice = Study(name="s", strategies=("ddp", "ddp"), gpus=(2, "2", "1x2")).expand()
    assert len(twice.runs) == 1 and not twice.paths.folder.exists()


def test_the_order_is_shuffled_by_the_seed_and_stable() -> None:
    study = Study(name="s", gpus=(1, 2, 4), repeats=3)
    order = list(study.expand().runs)
    assert order == list(study.expand().runs)
    other = list(study.changed(seed=1).expand().runs)
    assert other != order
    assert sorted(other) == sorted(order) != order


def test_a_sweep_of_one_strategy_makes_no_runs_of_another() -> None:
    sweep = {"ddp_comm_hook": ("none", "bf16"), "fsdp_hybrid_replicas": (1, 2)}
    plan = Study(name="s", strategies=("ddp", "fsdp"), gpus=(4,), sweep=sweep).expand()
    found = {(r.strategy, r.ddp_comm_hook, r.fsdp_hybrid_replicas) for r in plan.runs.values()}
    assert len(plan.runs) == 4
    assert found == {
        ("ddp", "none", 1),
        ("ddp", "bf16", 1),
        ("fsdp", "none", 1),
        ("fsdp", "none", 2),
    }


def test_overrides_replace_fields_settings_and_sweeps(tmp_path: Path) -> None:
    text = "gpus = [1, 2]\n[settings]\nglobal_batch_size = 64\n[sweep]\nlr = [0.1, 0.2]"
    study = load(tmp_path, text, gpus=(4,), lr=0.3, batch_size_per_rank=16)
    assert (study.name, study.gpus, study.sweep) == ("my", (4,), {})
    assert study.settings == {"lr": 0.3, "batch_size_per_rank": 16}
    # One batch size replaces the other kind, in a sweep too.
    study = load(tmp_path, "[sweep]\nglobal_batch_size = [64, 128]", batch_size_per_rank=16)
    assert (study.sweep, study.settings) == ({}, {"batch_size_per_rank": 16})
    assert {s.scaling for s in study.expand().runs.values()} == {"weak"}


def test_a_plan_is_saved_and_read_again() -> None:
    plan = Study(name="s", settings={"epochs": 2}, sweep={"lr": (0.1, 0.2)}).expand()
    plan.save()
    again = Plan.read(plan.paths.plan)
    assert (dict(again.runs), again.notes, again.study) == (dict(plan.runs), (), plan.study)
    # Runs that were planned before stay planned.
    other = Study(name="s", strategies=("fsdp",), gpus=(2,)).expand()
    other.save()
    assert set(Plan.read(other.paths.plan).runs) == {*plan.runs, *other.runs}


def test_what_is_not_a_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UsageError, match="no plan at"):
        Plan.read(path)
    for content in ("", "{", "[]", "{}", '{"study": 3, "runs": []}'):
        path.write_text(content)
        with pytest.raises(UsageError, match="is not a plan"):
            Plan.read(path)
