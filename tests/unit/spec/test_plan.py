"""Studies and plans: the file, the grid, its order, the words of --sweep, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.spec.options import with_words
from jobkit.spec.study import Plan, Study
from support.refusals import error_of


def load(folder: Path, text: str, **changes: Any) -> Study:
    (folder / "my.toml").write_text(text)
    return Study.load(folder / "my.toml", **changes)


def points(study: Study, *names: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(getattr(s, n) for n in names) for s in study.expand().runs.values())


def test_a_study_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    for text, message in [
        ("name = ", "my.toml: not valid TOML: "),
        ("gpu = [1]", "my.toml: unknown key 'gpu'; did you mean 'gpus'?"),
        ("epochs = 3", "'epochs' is a setting of the training: write it under [settings]"),
        ("[sweep]\nprecison = ['fp32']", "my.toml: unknown setting 'precison'; did you mean"),
        ("[sweep]\nprecision = 'fp32'", "sweep precision = 'fp32': must be a list"),
        ("[sweep]\nprecision = []", "must be a list of values, 1 or more"),
        ("[settings]\nnodes = 2", "'nodes' is no setting of a study"),
        ("command = []", "my.toml: command = []: its first word is the program"),
        ("repeats = 10000000", "60,000,000 runs, more than 100,000"),
        ("strategies = []", "strategies = []: must be a list of strings, 1 or more"),
        ("repeats = 0", "repeats = 0: must be a whole number, 1 or more"),
        ("name = '../x'", "study name '../x': use letters"),
        ("gpus = [0]", "gpus 0: must be a whole number, 1 or more, or NODESxRANKS"),
        ("gpus = ['2x']", "gpus '2x': must be"),
        ("gpus = [6]\ngpus_per_node = 4", "gpus 6: does not fill nodes of 4"),
        ("strategies = ['single']\ngpus = [2]", "the study has no run"),
    ]:
        assert message in error_of(lambda text=text: load(tmp_path, text).expand())


def test_sizes_are_ranks_or_nodes_by_ranks() -> None:
    study = Study(name="s", gpus=(1, 8, "2x3", "4"), gpus_per_node=4)
    assert study.sizes() == [(1, 1), (2, 4), (2, 3), (1, 4)]
    assert Study(name="s", gpus=(8,)).sizes() == [(1, 8)]


def test_single_is_planned_at_one_rank_only_and_that_is_said() -> None:
    study = Study(name="s", strategies=("single", "ddp"), gpus=(1, 2))
    assert points(study, "strategy", "world_size") == [("ddp", 1), ("ddp", 2), ("single", 1)]
    assert study.expand().notes == ("single runs at 1 rank only: not planned at 2",)


def test_a_sweep_makes_a_run_for_each_value_and_repeat() -> None:
    sweep: dict[str, Any] = {"precision": ("fp32", "bf16"), "lr": (0.1, 0.2)}
    study = Study(name="s", strategies=("ddp",), gpus=(1,), repeats=2, sweep=sweep)
    expected = [(p, lr, r) for p in ("bf16", "fp32") for lr in (0.1, 0.2) for r in (0, 1)]
    assert points(study, "precision", "lr", "repeat") == expected
    twice = Study(name="s", strategies=("ddp", "ddp"), gpus=(2, "2", "1x2")).expand()
    assert [s.run_id for s in twice.runs.values()] == [*twice.runs] and len(twice.runs) == 1
    # One of a strategy makes no runs of another.
    sweep = {"ddp_comm_hook": ("none", "bf16"), "fsdp_hybrid_replicas": (1, 2)}
    study = Study(name="s", strategies=("ddp", "fsdp"), gpus=(4,), sweep=sweep)
    expected = [("ddp", "bf16", 1), ("ddp", "none", 1), ("fsdp", "none", 1), ("fsdp", "none", 2)]
    assert points(study, "strategy", "ddp_comm_hook", "fsdp_hybrid_replicas") == expected


def test_the_order_is_shuffled_by_the_seed_and_stable() -> None:
    study = Study(name="s", gpus=(1, 2, 4), repeats=3)
    order = list(study.expand().runs)
    assert order == list(study.expand().runs)
    other = list(study.changed(seed=1).expand().runs)
    assert other != order and sorted(other) == sorted(order) != order


def test_overrides_replace_fields_settings_and_sweeps(tmp_path: Path) -> None:
    text = "gpus = [1, 2]\n[settings]\nglobal_batch_size = 64\n[sweep]\nlr = [0.1, 0.2]"
    study = load(tmp_path, text, gpus=(4,), lr=0.3, batch_size_per_rank=16)
    assert (study.name, study.gpus, study.sweep) == ("my", (4,), {})
    assert study.settings == {"lr": 0.3, "batch_size_per_rank": 16}
    # One batch size replaces the other kind, in a sweep too.
    study = load(tmp_path, "[sweep]\nglobal_batch_size = [64, 128]", batch_size_per_rank=16)
    assert (study.sweep, study.settings) == ({}, {"batch_size_per_rank": 16})


def test_a_plan_is_saved_and_read_again() -> None:
    plan = Study(name="s", settings={"epochs": 2}, sweep={"lr": (0.1, 0.2)}).expand()
    plan.save()
    again = Plan.read(plan.paths.plan)
    assert (dict(again.runs), again.notes, again.study) == (dict(plan.runs), (), plan.study)
    # Runs that were planned before stay planned.
    other = Study(name="s", strategies=("fsdp",), gpus=(2,)).expand()
    other.save()
    assert set(Plan.read(other.paths.plan).runs) == {*plan.runs, *other.runs}
    (note,) = plan.continued().notes
    assert "logs/s has 1 other run, to be" in note and "--name NAME" in note


def test_a_command_has_the_work_that_was_stated_before() -> None:
    work = {"unit": "images", "per_step": 512}
    first = Study(name="w", command=("true",), gpus=(1, 2), work=work).expand()
    first.save()
    again = Study(name="w", command=("true",), gpus=(1, 2)).expand().continued()
    assert again.runs == first.runs and again.study.work == work
    said = "the work of the command is that stated before: unit images, per_step 512"
    assert again.notes == (said,)
    other = Study(name="w", command=("true", "x"), gpus=(1, 2)).expand().continued()
    assert other.study.work == {} and "2 other runs" in other.notes[0]


def test_what_is_not_a_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UsageError, match="no plan at"):
        Plan.read(path)
    for content in ("", "{", "[]", "{}", '{"study": 3, "runs": []}'):
        path.write_text(content)
        with pytest.raises(UsageError, match="is not a plan"):
            Plan.read(path)
    # No run of a plan leaves its folder.
    plan = Study(name="s", strategies=("ddp",), gpus=(1,)).expand()
    plan.save()
    (run_id,) = plan.runs
    content = plan.paths.plan.read_text()
    for evil in ("../../x", "$(touch x)", "x;y", "<b>", "=1", "caf\\udce9", "x\\ny"):
        plan.paths.plan.write_text(content.replace(f'"{run_id}"', f'"{evil}"'))
        with pytest.raises(UsageError, match="run id"):
            Plan.read(plan.paths.plan)


# The words of --sweep.

TRAINING = Study(
    name="t", strategies=("ddp",), gpus=(1,), settings={"batch_size_per_rank": 8, "lr": 0.1},
    sweep={"width": (1, 2)},
)  # fmt: skip
COMMAND = Study(
    name="c", command=("python", "train.py", "--b={batch}", "--a={steps}"), gpus=(1,),
    parameters={"batch": 3, "steps": "{40 // ranks}"}, sweep={"batch": (6, 12)},
)  # fmt: skip


def test_settings_get_their_type_and_are_added_to_the_sweep_of_the_file() -> None:
    words = ["lr=0.1,1", "augment=true,false", "global-batch-size=64,128"]
    made = with_words(TRAINING, words)
    added = {"lr": (0.1, 1.0), "augment": (True, False), "global_batch_size": (64, 128)}
    assert made.sweep == {"width": (1, 2), **added}
    assert made.settings == {}  # swept settings, and the batch size of the other kind
    assert len(made.expand().runs) == 16
    assert with_words(TRAINING, ["width=3"]).sweep == {"width": (3,)}
    assert with_words(TRAINING, []) == TRAINING


def test_parameters_are_numbers_texts_or_formulas_as_in_a_file() -> None:
    made = with_words(COMMAND, ["steps={8 * ranks},1e-3,true,a b,-2", "batch=7"])
    assert made.sweep == {"batch": (7,), "steps": ("{8 * ranks}", 1e-3, True, "a b", -2)}
    words = {s.command[2:] for s in made.expand().runs.values()}
    assert words == {("--b=7", f"--a={a}") for a in ("8", "0.001", "True", "a b", "-2")}


def test_words_that_are_refused() -> None:
    for study, words, said in [
        (TRAINING, ["lr"], "--sweep 'lr': must be NAME=V1,V2"),
        (COMMAND, ["batch=1,,2"], "--sweep batch=1,,2: has an empty value"),
        (TRAINING, ["precison=fp32"], "did you mean 'precision'"),
        (TRAINING, ["width=1,two"], "width = 'two': must be a whole number"),
        (TRAINING, ["augment=yes"], "must be true or false"),
        (TRAINING, ["repeat=1,2"], "use strategies, gpus, repeats"),
        (COMMAND, ["bach=1"], "no {bach} in the command; did you mean 'batch'"),
    ]:
        assert said in error_of(lambda s=study, w=words: with_words(s, w).expand())
