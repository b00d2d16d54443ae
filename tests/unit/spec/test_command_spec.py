"""Studies of a command: the runs that they plan, plan.json, placeholders, and what is refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.rows import result_row
from jobkit.analysis.tables.series import series_labels
from jobkit.errors import UsageError
from jobkit.outcome.state import RunState
from jobkit.spec.command import CommandSpec, fill, program_name, resolve
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan, Study, read_spec
from support.refusals import error_of

NANO: dict[str, Any] = {
    "name": "nanogpt",
    "command": ("python", "train.py", "--batch={batch}", "--accumulate={accumulate}"),
    "gpus": (1, 2, "2x4"),
    "parameters": {"batch": 12, "accumulate": "{40 // ranks}"},
    "sweep": {"batch": (6, 12)},
    "work": {"unit": "tokens", "per_step": "{batch * 40 * 1024}", "scaling": "strong"},
}


def nano(**changes: Any) -> Study:
    return Study(**{**NANO, **changes})


def test_a_run_for_each_size_and_value_with_its_placeholders_replaced() -> None:
    runs = nano(repeats=2).expand().runs
    assert len(runs) == 3 * 2 * 2
    found = {s.world_size: s for s in runs.values() if s.parameters["batch"] == 6 and not s.repeat}
    assert found[8].command == ("python", "train.py", "--batch=6", "--accumulate=5")
    assert (found[8].nodes, found[8].ranks_per_node) == (2, 4)
    assert found[8].parameters == {"batch": 6, "accumulate": 5}
    assert {(s.work_per_step, s.scaling) for s in found.values()} == {(6 * 40 * 1024, "strong")}
    # What follows from the size makes no series of its own.
    assert len({json.dumps(s.comparable()) for s in found.values()}) == 1
    assert all(run_id.startswith("train-n") for run_id in runs)


def test_the_words_for_run_sh() -> None:
    (spec,) = nano(gpus=(2,), sweep={}, auto=False).expand().runs.values()
    options = "--launcher srun --warmup-steps 5 --why 5 --unit tokens"
    words = [*options.split(), "--work-per-step", "491520", "--no-auto", "--", *spec.command]
    assert spec.arguments() == words


def test_a_plan_comes_back_whole(tmp_path: Path) -> None:
    odd = ("python", "train.py", "a b", "$HOME", "it's", "two\nlines", "", "{{}}", "é")
    plan = replace(nano(command=odd).expand(), folder=tmp_path / "odd")
    plan.save()
    back = Plan.read(plan.paths.plan)
    assert (back.runs, back.study) == (plan.runs, plan.study)
    assert next(iter(back.runs.values())).command[-2:] == ("{}", "é")
    # The study of plan.json is a file that plans the same runs.
    kept = json.loads(plan.paths.plan.read_text())["study"]
    assert not {"strategies", "settings"} & kept.keys()
    assert Study(**kept).expand().runs == plan.runs
    assert not {"command", "launcher", "work"} & Study(name="x").to_dict().keys()
    # The kinds are told apart by the command.
    assert read_spec(RunSpec(epochs=3).to_dict()) == RunSpec(epochs=3)
    with pytest.raises(UsageError, match="did you mean 'command'"):
        read_spec({"commandd": ["x"], "command": ["x"]})


def test_a_pattern_by_its_path_is_found_from_any_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [nano(pattern=name).pattern for name in ("nanogpt", "./mine.toml", "/x/mine.toml")]
    assert found == ["nanogpt", str(tmp_path / "mine.toml"), "/x/mine.toml"]


def test_the_identity_of_a_run_is_what_it_does() -> None:
    one = CommandSpec(command=("python", "train.py"))
    assert one.run_id == replace(one, unit="images", warmup_steps=9, pattern="nanogpt").run_id
    changes: list[dict[str, Any]] = [{"command": ("python", "train.py", "x")}, {"repeat": 1}]
    changes += [{"nodes": 2}, {"launcher": "torchrun"}, {"auto": False}, {"parameters": {"a": 1}}]
    assert len({one.run_id, *(replace(one, **change).run_id for change in changes)}) == 7
    hostile = {"a": "../../etc", "b": "$(rm)", "c": "é" * 90}
    run_id = replace(one, parameters=hostile).run_id
    assert "/" not in run_id and ".." not in run_id and len(run_id) < 100


def test_the_name_of_a_program() -> None:
    for command, name in (
        (["python", "train.py", "--x"], "train"),
        (["python", "-m", "my.trainer", "a.py"], "trainer"),
        (["bash", "/a b/run it.sh"], "run-it"),
        (["./prog.exe"], "prog.exe"),
        (["--"], "command"),
    ):
        assert program_name(command) == Study.of_command(command).name == name
    # The folder of single jobs is not its own.
    assert Study.of_command(["python", "single.py"]).name == "single-study"


def test_a_parameter_named_as_a_column_of_another_meaning_has_a_column_of_its_own() -> None:
    spec = CommandSpec(command=("x",), parameters={"status": 7, "n_layer": 3})
    row = result_row(spec, RunState(status="ok"), RunRecords(), None, None)
    assert (row["status"], row["parameter_status"], row["n_layer"]) == ("ok", 7, 3)


def test_what_cannot_be_planned_is_said() -> None:
    changes: dict[str, Any]
    for changes, said in [
        ({"parameters": {"batch": 1, "accumulate": "{40 / ranks}"}, "gpus": (3,)}, "40 / 3 is not"),
        ({"parameters": {"batch": 12}}, "unknown name 'accumulate'"),
        ({"parameters": {"batch": 12, "accumulate": "{batch}"}}, "accumulate: {batch}: unknown"),
        ({"parameters": {"ranks": 2}}, "this name is the size's"),
        ({"parameters": {"a-b": 2}}, "letters, digits and _"),
        ({"parameters": {"a": [1]}}, "must be a number, a string"),
        ({"work": {"unit": "t", "per_step": 1, "scaling": "weak"}}, "in proportion to the ranks"),
        ({"work": {"per_step": 1}}, "needs its unit: --unit images, or unit ="),
        ({"work": {"unit": "t", "per_step": "{ranks - 9}"}}, "must be a number above 0"),
        ({"work": {"units": "t"}}, "did you mean 'unit'"),
        ({"work": {"scaling": "week"}}, "did you mean 'weak'"),
        ({"work": {"unit": 3}}, "unit = 3"),
        ({"launcher": "mpirun"}, "unknown launcher 'mpirun'"),
        ({"settings": {"epochs": 3}}, "--epochs is a setting of jobkit's own training"),
        ({"strategies": ("pp",)}, "not of a command"),
        ({"command": ("python", "{nods}"), "parameters": {}, "sweep": {}}, "did you mean 'nodes'"),
    ]:
        assert said in error_of(lambda changes=changes: nano(**changes).expand())
    # A study of the training takes no key of a command.
    keys = {"launcher": "once", "parameters": {"a": 1}, "work": {"unit": "x"}, "auto": False}
    for key, value in keys.items():
        with pytest.raises(UsageError, match=f"'{key}' is of a study of a command"):
            Study(name="x", **{key: value})


def test_the_scaling_is_seen_where_it_is_not_said() -> None:
    for work, seen in (({"per_step": "{batch * ranks}"}, "weak"), ({}, None)):
        runs = nano(work={"unit": "tokens", **work}).expand().runs.values()
        assert {s.scaling for s in runs} == {seen}
    # What is said of the work replaces that part only.
    changed = nano().changed(work={"per_step": 512})
    assert changed.work == {"unit": "tokens", "per_step": 512, "scaling": "strong"}


def labels(folder: Path, *words: str, **changes: Any) -> Counter[str]:
    """The series after another call of the same study, with this command."""
    command = ("python", "fit.py", *words)
    study = Study(name="fit", gpus=(1, 2), repeats=2, command=command, **changes)
    made = replace(study.expand(), folder=folder)
    made.save()
    return Counter(series_labels(Plan.read(made.paths.plan).runs).values())


def test_a_study_of_another_command_of_the_same_name_is_another_series(tmp_path: Path) -> None:
    assert labels(tmp_path, "--batch", "4") == {"fit": 4}
    assert labels(tmp_path, "--batch", "64") == {"fit, --batch 4": 4, "fit, --batch 64": 4}
    # What placeholders and parameters make of a command at each size is one series.
    words, other = ("--batch", "{512 // ranks}", "{b}"), tmp_path / "other"
    assert labels(other, *words, parameters={"b": "{ranks * 2}"}) == {"fit": 4}
    two = labels(other, *words, parameters={"b": "{ranks * 3}"})
    assert two == {"fit, b={ranks * 2}": 4, "fit, b={ranks * 3}": 4}
    # A parameter that does not follow from the size makes a series, and so does the hook.
    third = tmp_path / "third"
    labels(third, "{b}", parameters={"b": 6})
    apart = labels(third, "{b}", parameters={"b": 12}, auto=False)
    assert apart == {"fit, auto, b=6": 4, "fit, no auto, b=12": 4}


# Placeholders: arithmetic of whole numbers over names, and nothing else.

NAMES = {"ranks": 8, "nodes": 2, "batch": 12, "lr": 0.1, "tag": "a b", "on": True}


def test_what_is_replaced() -> None:
    for text, filled in (
        ("--batch={ batch }", "--batch=12"),
        ("{40 // ranks}x{ranks-1}", "5x7"),
        ("{96 / ranks}", "12"),
        ("{(ranks + 2) * -3 % 7}", "5"),
        ("{lr} {tag} {on}", "0.1 a b True"),
        ('{{"a": {batch}}}', '{"a": 12}'),
        ("$HOME\n'é'", "$HOME\n'é'"),
    ):
        assert fill(text, NAMES) == filled
    # A text that is one placeholder keeps its type.
    for value, resolved in (("{batch * 2}", 24), ("{on}", True), ("{batch} ", "12 "), (1.5, 1.5)):
        assert resolve(value, NAMES) == resolved


def test_what_is_refused_in_one_line() -> None:
    no_arithmetic = ["{2 ** 9}", "{1.5}", "{__import__('os').system('touch hacked')}", '{"a": 1}']
    no_arithmetic += ["{ranks.__class__}", "{}", "{" + "1+" * 500 + "1}"]
    for text, said in [
        ("{rank}", "unknown name 'rank'; did you mean 'ranks'?"),
        ("{x}", "unknown name 'x' (known: ranks, nodes"),
        ("{100 / ranks}", "100 / 8 is not a whole number (// would round down)"),
        ("{1 // (ranks - 8)}", "divides by zero"),
        ("{lr * 2}", "lr is 0.1, and arithmetic is of whole numbers"),
        ("{on + 1}", "on is True"),
        ("{{ranks}", "a single '}': write }} for a brace"),
        ("a{", "a single '{': write {{ for a brace"),
        *[(text, "not arithmetic of") for text in no_arithmetic],
    ]:
        error = error_of(fill, text, NAMES)
        assert said in error and len(error) < 500
