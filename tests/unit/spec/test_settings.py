"""Settings: their checks, their forms as words and in files, run ids that stay; sources of data."""

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.paths import REPOSITORY
from jobkit.payload import signals as faults
from jobkit.payload.main import parser, read_settings
from jobkit.payload.signals import StopRequest
from jobkit.spec import options
from jobkit.spec.dataset import IDX_FILES, check_source, folder_path
from jobkit.spec.options import heading
from jobkit.spec.runspec import SETTINGS, TYPES, Every, RunSpec
from jobkit.spec.strategies import FACTS, DDPFacts, owners
from jobkit.spec.study import STUDIES, Study
from support.idx_files import write_idx
from support.refusals import error_of

META = {f.name: f.metadata for f in fields(RunSpec)}


def parse(words: list[str]) -> dict[str, Any]:
    made = argparse.ArgumentParser(allow_abbrev=False)
    options.add_recipe_argument(made)
    options.add_spec_arguments(made)
    return options.chosen_settings(made.parse_args(words))


def test_what_cannot_be_used_says_why() -> None:
    for values, text in [
        ({"epochs": "much"}, "epochs = 'much': must be a whole number, 1 or more"),
        ({"width": 257}, "width = 257: must be a whole number from 1 to 256"),
        ({"augment": 1}, "augment = 1: must be true or false"),
        ({"lr": float("nan")}, "lr = nan: must be a number"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"strategy": "ddpp"}, "unknown strategy 'ddpp'; did you mean 'ddp'? (known: "),
        ({"dataset": "syn\nthetic"}, "has a control character"),
        ({"global_batch_size": 4, "batch_size_per_rank": 4}, "not both"),
        ({"strategy": "single", "ranks_per_node": 2}, "'single' runs at 1 rank, not 2; use ddp"),
        ({"global_batch_size": 2, "accumulate": 3}, "--accumulate 3 is more than the samples"),
        ({"epoch": 3}, "unknown setting 'epoch'; did you mean 'epochs'"),
    ]:
        assert text in error_of(RunSpec.from_dict, values)


def test_words_are_values_and_a_flag_takes_none() -> None:
    with pytest.raises(UsageError, match="must be a whole number"):
        RunSpec(**parse(["--epochs", "2.5"]))
    with pytest.raises(SystemExit, match="2"):
        parse(["--augment", "False"])
    assert type(RunSpec(lr=1).lr) is float
    for wrong in (True, 5.0, "5"):  # as good as the default, but for their type
        with pytest.raises(UsageError, match="epochs"):
            RunSpec(epochs=wrong)  # type: ignore[arg-type]


def test_a_checkpoint_is_every_epoch_some_iterations_or_a_time() -> None:
    for text, every in (
        (None, Every()),
        ("epoch", Every(epochs=True)),
        ("200", Every(iterations=200)),
        ("10m", Every(seconds=600.0)),
        ("1.5h", Every(seconds=5400.0)),
    ):
        assert Every.of(text) == every
        assert RunSpec(checkpoint_every=text).checkpoint_every == text
    for text in (*("", "0", "-1", "0s", "0.0m", "epochs", "1d", "1.5", "s", "1e3s"), "1..2s", "१s"):
        with pytest.raises(UsageError, match="must be epoch, a number of iterations"):
            RunSpec(checkpoint_every=text)


def test_run_ids_stay() -> None:
    """A rerun finds what it did before by these: they may change with a default alone."""
    golden: list[tuple[dict[str, Any], str]] = [
        ({}, "ddp-n1-g1-b512-auto-r0-44136f"),
        ({"strategy": "fsdp", "nodes": 2, "ranks_per_node": 4}, "fsdp-n2-g4-b512-auto-r0-1a56c6"),
        ({"batch_size_per_rank": 64, "ranks_per_node": 2}, "ddp-n1-g2-pb64-auto-r0-4afc04"),
        ({"precision": "bf16", "repeat": 2, "epochs": 7}, "ddp-n1-g1-b512-bf16-r2-bec299"),
    ]
    for values, run_id in golden:
        assert RunSpec(**values).run_id == run_id


def test_what_changes_the_outcome_or_the_speed_changes_the_run_id_and_nothing_else() -> None:
    texts = {"model": "mlp", "dataset": "synthetic", "fsdp_wrap": "A"}
    for name in (n for n in SETTINGS if META[n]["identity"]):
        default = getattr(RunSpec(), name)
        if name in texts:
            value: Any = texts[name]
        elif META[name]["choices"]:
            value = next(c for c in META[name]["choices"] if c != default)
        elif TYPES[name] is bool:
            value = not default
        else:
            value = (default or 0) + (0.05 if TYPES[name] is float else 2)
        changed = replace(RunSpec(), **{name: value})
        assert changed.run_id != RunSpec().run_id, name
        # As words of a command line and as JSON it comes back.
        if META[name]["option"]:
            assert RunSpec(**parse(changed.arguments())) == changed
        assert RunSpec.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed
    kept = {"data_dir": "/a", "checkpoint_every": "30s", "checkpoint_keep": 5}
    spec = RunSpec(**kept, checkpoint_checksums=True, lr=1e-300)
    assert spec.run_id == RunSpec(lr=1e-300).run_id
    assert RunSpec(**parse(spec.arguments())) == spec


def test_a_global_batch_is_strong_and_a_batch_a_rank_weak_scaling() -> None:
    weak = RunSpec(batch_size_per_rank=64, nodes=2, ranks_per_node=4)
    assert (weak.scaling, weak.steps_batch_size, weak.world_size) == ("weak", 512, 8)
    strong = RunSpec(global_batch_size=100, ranks_per_node=3)
    assert (strong.scaling, strong.steps_batch_size) == ("strong", 100)


def test_a_fault_is_injected_in_one_rank_of_one_attempt_at_its_iteration() -> None:
    def planned(text: str, attempt: int = 0, rank: int = 0) -> faults.PlannedFault | None:
        return faults.read_fault(attempt, rank, environ={faults.VARIABLE: text})

    assert planned("") is planned("kill@5:1") is planned("hang@7:1", attempt=1, rank=1) is None
    assert planned("kill@5") == faults.PlannedFault("kill", 5)
    assert planned("usr2@7:1:2", attempt=2, rank=1) == faults.PlannedFault("usr2", 7)
    fault = faults.PlannedFault("raise", 3)
    fault.inject(2, StopRequest())
    with pytest.raises(RuntimeError, match="injected after iteration 3"):
        fault.inject(3, StopRequest())
    for text in ("kill", "kill@", "kill@x", "die@3", "kill@3:1:2:3", "kill@-1"):
        with pytest.raises(UsageError, match=r"must be KIND@ITERATION\[:RANK\[:ATTEMPT\]\]"):
            planned(text)


@pytest.mark.parametrize("name", options.RECIPES)
def test_a_recipe_is_nothing_but_settings_that_the_users_own_replace(name: str) -> None:
    fast = options.RECIPES["fast"]  # 11.5 per 1024 x (1 + 1 / (1 - momentum)) samples is published
    assert fast["lr"] == pytest.approx(11.5 / (1 + 1 / (1 - fast["momentum"])), rel=0.01)
    assert fast["weight_decay"] == pytest.approx(0.0153 / 11.5, rel=0.01)
    spec = RunSpec(**parse(["--recipe", name]))
    assert spec.differences().keys() <= options.RECIPES[name].keys()
    assert RunSpec(**parse(spec.arguments())) == spec
    assert parse(["--recipe", name, "--epochs", "3"])["epochs"] == 3
    weak = parse(["--recipe", name, "--batch-size-per-rank", "64"])
    assert (weak["batch_size_per_rank"], "global_batch_size" in weak) == (64, False)


def test_a_file_by_hand_with_options_over_it_or_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "my.yaml"
    path.write_text("epochs: 3  # passes\noptimizer: adam\nlr: 1e-3\naugment: false\nmodel: mlp\n")
    spec = read_settings(parser().parse_args(["--spec", str(path), "--epochs", "7"]))
    assert (spec.epochs, spec.optimizer, spec.lr, spec.augment) == (7, "adam", 0.001, False)
    assert spec.model == "mlp"
    for text, message in (
        ("epoch: 3", "unknown setting 'epoch'; did you mean 'epochs'?"),
        ("- epochs", "lines such as 'epochs: 3'"),
        ("", "lines such as 'epochs: 3'"),
        ("epochs: 3\n  lr: 1", "not valid YAML: "),
        ("epochs: !!python/object/apply:os.system ['true']", "not valid YAML: "),
    ):
        path.write_text(text)
        said = error_of(options.read_spec_file, path)
        assert said.startswith(f"--spec {path}: ") and message in said
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="pip install pyyaml"):
        options.read_spec_file(path)


def test_the_table_of_strategies_names_what_is_there() -> None:
    for name, facts in FACTS.items():
        for variant in facts.verified:
            RunSpec.from_dict({"strategy": name, **variant.settings})
        begins = [*facts.refuses, *facts.owns]
        assert [s for s in begins if not any(n.startswith(s) for n in SETTINGS)] == [], name
        module, kind = facts.code.split(".")
        file = REPOSITORY / "src" / "jobkit" / "payload" / "strategies" / f"{module}.py"
        assert f"class {kind}(" in file.read_text(), name


def test_the_longest_beginning_says_whose_a_setting_is(monkeypatch) -> None:
    local = type("Local", (DDPFacts,), {"name": "local", "owns": ("ddp_", "ddp_comm_")})
    monkeypatch.setitem(FACTS, "local", local())
    names = ("ddp_bucket_mib", "ddp_comm_hook", "fsdp_wrap", "lr")
    assert [owners(name) for name in names] == [["ddp", "local"], ["local"], ["fsdp"], []]
    assert heading(RunSpec.__dataclass_fields__["ddp_bucket_mib"]) == "strategy ddp, local"


# Their sizes, and at each size so many ways with three repeats: DDP, a bf16 hook, FSDP and HSDP.
ON_GPUS = {"gpu": ({1, 2, 4, 8, 16}, 1), "gpu-wide": ({4, 8, 16}, 4)}
PRESETS = {"high-performance": (8, 32), "memory-efficient": (2, 128), "single-process": (1, 256)}


def test_every_study_of_the_project_expands() -> None:
    for name in sorted(p.stem for p in STUDIES.glob("*.toml")):
        plan = Study.load(name).expand()
        assert plan.study.name == name
        if name in PRESETS:
            (spec,) = plan.runs.values()
            assert (spec.world_size, spec.batch_size_per_rank) == PRESETS[name]
        if name in ON_GPUS:
            sizes, ways = ON_GPUS[name]
            runs = list(plan.runs.values())
            assert {spec.world_size for spec in runs} == sizes and len(runs) == 3 * len(
                sizes
            ) * ways
            assert {spec.device for spec in runs} == {"cuda"}


def test_good_sources_pass_and_others_are_named(tmp_path: Path) -> None:
    root = tmp_path / "my images"
    for folder, message in (
        ("", "no class folder in train/"),
        ("train/a", "no class folder in test/"),
        ("test/c", "class folders differ: a only in train/, c only in test/"),
    ):
        (root / folder).mkdir(parents=True)
        assert error_of(check_source, f"folder:{root}").startswith(f"{root}: {message}")
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "train" / "README").touch()
    for source in (f"folder:{tmp_path}", "synthetic"):
        check_source(source)
    assert folder_path("cifar10") is None
    (tmp_path / "images.tar").touch()
    for packed in (True, False):
        folder = write_idx(tmp_path / f"mnist-{packed}", packed)
        check_source(RunSpec(dataset=f"idx:{folder}").dataset)
    (folder / IDX_FILES["test_labels"]).unlink()
    for source, message in (
        (f"folder:{tmp_path}/images.tar", "no such directory of images; unpack it first"),
        (f"folder:{tmp_path}/absent", "absent: no such directory of images"),
        ("folder:", "folder: needs a path"),
        (f"idx:{tmp_path}/absent", "no such directory of IDX files"),
        ("idx:", "idx: needs a path"),
        (f"idx:{folder}", "has no t10k-labels-idx1-ubyte or "),
    ):
        assert message in error_of(check_source, source)
