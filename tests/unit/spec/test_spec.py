"""Settings: their checks, their form on the command line, and run ids that stay."""

import argparse
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobkit.errors import UsageError
from jobkit.spec.groups import GROUPS
from jobkit.spec.options import add_spec_arguments, given_settings
from jobkit.spec.runspec import DATASETS, MODELS, SETTINGS, STRATEGIES, RunSpec

META = {f.name: f.metadata for f in fields(RunSpec)}
TYPES = {f.name: getattr(f.type, "__name__", str(f.type)) for f in fields(RunSpec)}


def parse(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_spec_arguments(parser)
    return given_settings(parser.parse_args(words))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_type_is_refused_by_name(name: str) -> None:
    wrong: Any = 7 if TYPES[name].startswith("str") else "much"
    with pytest.raises(UsageError, match=rf"^{name} = {wrong!r}: must be "):
        RunSpec(**{name: wrong})


@pytest.mark.parametrize("name", [n for n in SETTINGS if TYPES[n] == "bool"])
def test_a_number_is_no_truth_value(name: str) -> None:
    with pytest.raises(UsageError, match="true or false"):
        RunSpec(**{name: 1})


@pytest.mark.parametrize("name", [n for n in SETTINGS if META[n]["low"] is not None])
def test_a_value_below_its_range_is_refused(name: str) -> None:
    low = META[name]["low"]
    with pytest.raises(UsageError, match=rf"^{name} = .*(or more|from )"):
        RunSpec(**{name: low - 1})


@pytest.mark.parametrize("name", [n for n in SETTINGS if META[n]["high"] is not None])
def test_a_value_above_its_range_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} = .* to {META[name]['high']}"):
        RunSpec(**{name: META[name]["high"] + 1})


@pytest.mark.parametrize("name", [n for n in SETTINGS if "float" in TYPES[n]])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{name} = "):
        RunSpec(**{name: value})


@pytest.mark.parametrize("name", [n for n in SETTINGS if META[n]["choices"]])
def test_an_unknown_choice_is_refused_with_the_known_ones(name: str) -> None:
    known = META[name]["choices"]
    with pytest.raises(UsageError, match=f"known: {', '.join(known)}"):
        RunSpec(**{name: known[-1] + "x"})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"strategy": "ddpp"}, "unknown strategy 'ddpp'; did you mean 'ddp'?"),
        ({"model": "ccn"}, "unknown model 'ccn'; did you mean 'cnn'?"),
        ({"dataset": "cifar100"}, "unknown dataset 'cifar100'; did you mean 'cifar10'?"),
        ({"dataset": "syn\nthetic"}, "has a control character"),
        ({"data_dir": "a\x00b"}, "has a control character"),
        ({"global_batch_size": 4, "batch_size_per_rank": 4}, "not both"),
        ({"strategy": "single", "ranks_per_node": 2}, "'single' runs at 1 rank, not 2; use ddp"),
        ({"global_batch_size": 2, "accumulate": 3}, "--accumulate 3 is more than the samples"),
    ],
)
def test_what_cannot_be_used_says_why(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunSpec(**values)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown setting 'epoch'; did you mean 'epochs'"):
        RunSpec.from_dict({"epoch": 3})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--epochs", "0"], "a whole number, 1 or more"),
        (["--epochs", "2.5"], "a whole number, 1 or more"),
        (["--lr", "fast"], "a number, 0.0 or more"),
        (["--width", "257"], "from 1 to 256"),
        (["--augment", "False"], "unrecognized arguments: False"),
        (["--epoch", "3"], "unrecognized arguments"),
    ],
)
def test_wrong_words_end_with_2(words: list[str], text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Any value that a setting may have."""
    kind, meta = TYPES[name], META[name]
    low, high = meta["low"], meta["high"]
    if meta["choices"]:
        return st.sampled_from(meta["choices"])
    if name == "model":
        return st.sampled_from([*MODELS, "my.models:make"])
    if name == "dataset":
        paths = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1)
        return st.sampled_from(DATASETS) | paths.map("folder:{}".format)
    if "bool" in kind:
        return st.booleans()
    if "int" in kind:
        values: st.SearchStrategy[Any] = st.integers(int(low), int(high or low + 10**9))
    elif "float" in kind:
        values = st.floats(low, high if high is not None else 1e300)
    else:
        values = st.text(st.characters(exclude_categories=["Cc", "Cs"])).filter(
            lambda text: not text.startswith("-")  # a path is never taken for an option
        )
    return st.none() | values if "None" in kind else values


OPTIONS = [n for n in SETTINGS if META[n]["option"]]
SPECS = st.fixed_dictionaries({}, optional={name: values_of(name) for name in OPTIONS})


def made(values: dict[str, Any]) -> RunSpec | None:
    try:
        return RunSpec(**values)
    except UsageError:  # two kinds of batch, or more microbatches than samples
        return None


@given(SPECS)
def test_arguments_bring_every_spec_back(values: dict[str, Any]) -> None:
    spec = made(values)
    if spec is not None:
        assert RunSpec(**parse(spec.arguments())) == spec


@given(SPECS)
def test_json_brings_every_spec_back(values: dict[str, Any]) -> None:
    spec = made(values)
    if spec is not None:
        again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
        assert (again, again.run_id) == (spec, spec.run_id)


# A rerun finds what it did before by these. They may change with a setting's default, and for no
# other reason.
GOLDEN = [
    ({}, "ddp-n1-g1-b512-auto-r0-44136f"),
    ({"strategy": "fsdp", "nodes": 2, "ranks_per_node": 4}, "fsdp-n2-g4-b512-auto-r0-1a56c6"),
    ({"batch_size_per_rank": 64, "ranks_per_node": 2}, "ddp-n1-g2-pb64-auto-r0-4afc04"),
    ({"precision": "bf16", "repeat": 2, "epochs": 7, "lr": 0.1}, "ddp-n1-g1-b512-bf16-r2-0af255"),
    ({"dataset": "folder:/data/images.tar"}, "ddp-n1-g1-b512-auto-r0-2b61d1"),
]


# Every setting away from its default.
ALL = {
    "nodes": 3,
    "ranks_per_node": 3,
    "repeat": 2,
    "strategy": "pp",
    "epochs": 7,
    "seed": 2,
    "device": "cuda",
    "threads": 2,
    "timeout_s": 600.05,
    "keep_memory": False,
    "model": "mlp",
    "width": 3,
    "precision": "fp16",
    "channels_last": False,
    "compile": True,
    "activation_checkpointing": True,
    "dataset": "synthetic",
    "data_dir": "/d",
    "train_samples": 2,
    "test_samples": 2,
    "augment": False,
    "global_batch_size": 500,
    "accumulate": 3,
    "eval_batch_size": 502,
    "optimizer": "adamw",
    "lr": 0.1,
    "momentum": 0.9500000000000001,
    "nesterov": False,
    "weight_decay": 0.0505,
    "lr_schedule": "constant",
    "lr_warmup_epochs": 0.05,
    "lr_scaling": "sqrt",
    "lr_base_batch_size": 258,
    "clip_norm": 0.05,
    "ddp_bucket_mib": 25.05,
    "ddp_gradient_as_bucket_view": False,
    "ddp_static_graph": True,
    "ddp_find_unused_parameters": True,
    "ddp_comm_hook": "powersgd",
    "ddp_powersgd_rank": 4,
    "ddp_powersgd_start": 12,
    "sync_batchnorm": True,
    "zero1": True,
    "fsdp_wrap": "A",
    "fsdp_wrap_min_parameters": 1002,
    "fsdp_reshard_after_forward": False,
    "fsdp_reduce_fp32": False,
    "fsdp_cpu_offload": True,
    "fsdp_hybrid_replicas": 3,
    "fsdp_prefetch": 2,
    "pipeline_stages": 2,
    "pipeline_schedule": "interleaved",
    "pipeline_split": "a",
    "microbatches": 2,
    "checkpoint_every": "30s",
    "checkpoint_keep": 4,
    "checkpoint_async": True,
    "stop_signal": "USR1",
    "warmup_iterations": 7,
    "breakdown_iterations": 12,
    "profile": "3-4",
    "profile_ranks": "all",
}
GOLDEN.append((ALL, "pp-n3-g3-b500-fp16-r2-4952e2"))
# Settings that came later: the ids above must be as they were.
LATER: dict[str, Any] = {"fp32": "tf32", "deterministic": True}
GOLDEN.append(({**ALL, **LATER}, "pp-n3-g3-b500-fp16-r2-44e993"))
OF_RECIPES = {"flip": "alternating", "crop_padding": 2, "tta": "flip", "bias_lr_factor": 2.0}
OF_RECIPES |= {"label_smoothing": 0.05, "lookahead_every": 5}
GOLDEN.append(({**ALL, **LATER, **OF_RECIPES}, "pp-n3-g3-b500-fp16-r2-a79a8c"))
LATER |= {"fsdp_group_mib": 0.0, "cudnn_benchmark": False, "compile_mode": "max-autotune"}
GOLDEN.append(({**ALL, **LATER}, "pp-n3-g3-b500-fp16-r2-ea0914"))
LATER |= OF_RECIPES
OF_MLP = {"hidden": 7, "train_split": 0.5}
GOLDEN.append(({**ALL, **LATER, **OF_MLP}, "pp-n3-g3-b500-fp16-r2-c9751d"))
LATER |= OF_MLP
GOLDEN.append(({**ALL, **LATER, "max_steps": 100}, "pp-n3-g3-b500-fp16-r2-4a5ff7"))
LATER |= {"max_steps": 100}
LATER |= {"check_ranks": 50}  # no part of a run's identity


@pytest.mark.parametrize(("values", "run_id"), GOLDEN)
def test_run_ids_stay(values: dict[str, Any], run_id: str) -> None:
    assert RunSpec(**values).run_id == run_id


def test_the_fixed_run_ids_cover_every_setting() -> None:
    assert {*ALL, *LATER, "batch_size_per_rank"} == set(SETTINGS)


def test_every_setting_is_in_one_group() -> None:
    names = [f.name for group in GROUPS.values() for f in fields(group)]
    assert sorted(names) == sorted(SETTINGS)


def test_where_the_data_lies_is_no_part_of_a_runs_identity() -> None:
    assert RunSpec(data_dir="/a").run_id == RunSpec().run_id


def test_every_other_setting_changes_the_run_id() -> None:
    texts = {"model": "mlp", "dataset": "synthetic", "fsdp_wrap": "A", "pipeline_split": "a"}
    for name in (n for n in SETTINGS if META[n]["identity"]):
        default = getattr(RunSpec(), name)
        if name in texts:
            value: Any = texts[name]
        elif META[name]["choices"]:
            value = next(c for c in META[name]["choices"] if c != default)
        elif isinstance(default, bool) or TYPES[name].startswith("bool"):
            value = not default
        else:
            value = (default or 0) + (0.05 if "float" in TYPES[name] else 2)
        assert replace(RunSpec(), **{name: value}).run_id != RunSpec().run_id, name


def test_a_global_batch_is_strong_and_a_batch_a_rank_weak_scaling() -> None:
    weak = RunSpec(batch_size_per_rank=64, nodes=2, ranks_per_node=4)
    assert (weak.scaling, weak.steps_batch_size, weak.world_size) == ("weak", 512, 8)
    strong = RunSpec(global_batch_size=100, ranks_per_node=3)
    assert (strong.scaling, strong.steps_batch_size) == ("strong", 100)


def test_strategies_are_those_that_the_payload_has() -> None:
    assert set(STRATEGIES) >= {"single", "ddp", "fsdp"}


def test_a_value_that_was_sound_once_is_no_pass_for_another_type() -> None:
    assert RunSpec(strategy="ddp", epochs=1).epochs == 1
    assert type(RunSpec(strategy="ddp", lr=1).lr) is float
    assert type(RunSpec(strategy="ddp", lr=1).lr) is float  # again, where 1.0 is known
    for wrong in (True, 1.0, "1"):
        with pytest.raises(UsageError, match="epochs"):
            RunSpec(strategy="ddp", epochs=wrong)
