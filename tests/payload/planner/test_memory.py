"""`jobkit memory`: known sums, activations as autograd saves them; bad input, also of `advise`."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobkit.errors import Exit
from jobkit.payload.memory import Share
from jobkit.payload.model import build_model
from jobkit.payload.strategies.recompute import checkpoint_blocks
from jobkit.payload.strategies.stages import cut
from jobkit.planner.activations import passes
from jobkit.planner.advise import main as advise
from jobkit.planner.footprints import Footprint, Subject, footprint
from jobkit.planner.memory import main
from jobkit.spec.runspec import RunSpec

OWN = """
import torch
from torch import nn

class Looks(nn.Linear):
    '''Looks at a number while it is made, which no fake tensor has.'''
    def __init__(self):
        super().__init__(3072, 10)
        self.scale = [x.item() for x in torch.linspace(0, 1, 3)]
    def forward(self, x):
        return super().forward(x.flatten(1)) * self.scale[1]

class Decides(nn.Linear):
    def __init__(self):
        super().__init__(3072, 10)
    def forward(self, x):
        return super().forward(x.flatten(1) if x.sum().item() >= 0 else 2 * x.flatten(1))

def nothing():
    return None

def broken():
    raise KeyError("depth")
"""


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main([*words, "--json"]) == Exit.OK
    return {each["strategy"]: each for each in json.loads(capsys.readouterr().out)}


def test_seven_billion_parameters_under_adam(capsys: pytest.CaptureFixture[str]) -> None:
    """26.1 + 26.1 + 52.2 = 104.3 GiB on one GPU, 13.0 on each of eight: a textbook example."""
    words = ("--parameters", "7e9", "--optimizer", "adamw", "--gpus", "8")
    found = as_json(capsys, *words)
    ddp = {name: round(found["ddp"][f"{name}_mib"] / 1024, 1) for name in SUMS}
    assert ddp == SUMS
    assert round(found["fsdp, full shard"]["total_mib"] / 1024, 1) == 13.0
    assert found["ddp"]["activations_mib"] is None
    assert list(found) == [
        *("single", "dp", "ddp", "fsdp, full shard"),
        *("fsdp, gradients and optimizer", "fsdp, hybrid", "mp", "pp"),
    ]
    assert main(list(words)) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if " ddp  " in line]
    assert line.split() == ["*", "ddp", "26.1", "26.1", "52.2", "0", "-", "0", "0", "104.3"]
    assert lines[2].split()[0] == "GiB"


SUMS = {"parameters": 26.1, "gradients": 26.1, "optimizer": 52.2, "total": 104.3}


def test_csv_has_the_rows_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "mlp", "--gpus", "2", "--strategy", "fsdp")
    found = as_json(capsys, *words)
    assert main([*words, "--csv"]) == Exit.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [r["strategy"] for r in rows] == list(found)
    for r in rows:
        assert float(r["total_mib"]) == found[r["strategy"]]["total_mib"]
    assert [name for name, each in found.items() if each["asked"]] == ["fsdp, full shard"]


def really_saved(model: nn.Module, images: int, autocast: bool) -> int:
    """Bytes that autograd saves in a real forward pass, without the parameters."""
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        out = model(torch.zeros(images, 3, 32, 32))
        F.cross_entropy(out.float(), torch.zeros(images, dtype=torch.int64), reduction="sum")
    return sum(s.nbytes() for at, s in kept.items() if at not in known)


@pytest.mark.parametrize(
    ("model", "precision"), [("cnn", "fp32"), ("mlp", "bf16"), ("resnet18", "bf16")]
)
def test_activations_are_those_that_autograd_saves(model: str, precision: str) -> None:
    spec = RunSpec(model=model, precision=precision)
    (found,) = passes(spec, 6, 10)
    real = really_saved(build_model(spec, 10), 6, precision == "bf16")
    # In fp32 the input is saved itself; under autocast a copy of it is.
    taken = found.taken if precision == "fp32" else 0
    # The statistics of a batch normalisation are in fp32 there: a few numbers a channel.
    assert found.saved + taken == pytest.approx(real, rel=1e-3 if precision == "bf16" else 0)


def test_checkpointing_keeps_the_blocks_inputs_and_one_block() -> None:
    spec = RunSpec(model="cnn", activation_checkpointing=True)
    (plain,) = passes(RunSpec(model="cnn"), 6, 10)
    (found,) = passes(spec, 6, 10)
    model = build_model(spec, 10)
    checkpoint_blocks(model)
    inputs = really_saved(model, 6, False)
    # The first stage saves most: the convolution's output, and where the pooling took its maxima.
    largest = 6 * (32 * 32 * 32 * 4 + 32 * 16 * 16 * 8)
    assert found.saved + found.taken == inputs + largest < plain.saved + plain.taken


def test_sharded_low_precision_halves_the_activations() -> None:
    full, low = (
        passes(RunSpec(model="mlp", strategy="fsdp", precision=p), 64, 10)[0]
        for p in ("fp32", "bf16")
    )
    assert low.taken * 2 == full.taken
    assert full.saved / 2 <= low.saved < full.saved * 0.51  # the loss stays in fp32


def test_a_pipelines_stages_save_what_the_model_does() -> None:
    spec = RunSpec(model="cnn")
    (whole,) = passes(spec, 8, 10)
    stages = passes(spec, 8, 10, lambda model: cut(model, 3))
    assert [a.given for a in stages[:-1]] == [b.taken for b in stages[1:]]
    between = sum(s.taken for s in stages[1:])
    assert sum(s.saved for s in stages) + between == whole.saved


def of(**settings: Any) -> Footprint:
    return footprint(RunSpec(**{"model": "mlp", **settings}), Subject())


def test_gpipe_keeps_every_microbatch_and_1f1b_one_a_stage() -> None:
    settings = {"strategy": "pp", "ranks_per_node": 2, "microbatches": 8}
    gpipe = of(pipeline_schedule="gpipe", **settings)
    one = of(pipeline_schedule="1f1b", **settings)
    assert gpipe.activations == 4 * (one.activations or 0) > 0
    assert gpipe.share == one.share


def test_what_fsdp_gathers() -> None:
    """The mlp's layers have 1,573,376, 131,328 and 2,570 parameters."""
    big, middle, small = 1_573_376, 131_328, 2_570
    both = {"strategy": "fsdp", "ranks_per_node": 4, "fsdp_group_mib": 0.0}
    reducing = big * (4 + 4)
    assert of(**both).communication == (big + middle) * 4 + reducing
    kept = of(fsdp_reshard_after_forward=False, **both)
    assert kept.communication == (big + middle + small) * 4 + reducing
    assert kept.share == of(**both).share
    low = of(precision="bf16", **both)
    assert low.communication == (big + middle) * 2 + big * (2 + 4)
    # Gradients that microbatches add up stay whole.
    whole = (big + middle + small) * 4
    assert of(accumulate=2, **both).communication == (big + middle) * 4 + reducing + whole
    # One group of all of them.
    merged = of(**{**both, "fsdp_group_mib": 4.0})
    assert merged.communication == (big + middle + small) * (4 + 4 + 4)


def test_the_total_has_every_part_that_is_on_the_device() -> None:
    share = Share(parameters=1, gradients=2, optimizer=4, buffers=8)
    whole = Footprint(
        label="x", spec=RunSpec(), share=share, activations=16, communication=32, data=64, host=3
    )
    assert whole.total == 1 + 2 + 4 + 8 + 16 + 32 + 64 - 3
    assert replace(whole, activations=None, communication=None).total == 76


def test_offloaded_state_is_on_the_host() -> None:
    here, there = (
        of(strategy="fsdp", ranks_per_node=2, fsdp_cpu_offload=offload) for offload in (False, True)
    )
    assert here.share == there.share
    assert there.host == there.share.total
    assert here.total - there.total == there.host


def test_a_factory_that_looks_at_numbers_is_called_for_real() -> None:
    spec = RunSpec(model="memory_models:Looks")
    (found,) = passes(spec, 4, 10)
    assert found.taken == 4 * 3072 * 4
    assert footprint(spec, Subject()).share.parameters == (3072 * 10 + 10) * 4


REFUSED = (
    (main, "--model ccn", "unknown model 'ccn'; did you mean 'cnn'?"),
    (main, "--gpus 0", "argument --gpus: '0': must be a whole number, 1 or more"),
    (main, "--parameters -7e9", "argument --parameters: "),
    (main, "--gpus 3 --nodes 2", "--gpus 3: 2 nodes cannot have the same number each"),
    (main, "--parameters 7e9 --width 2", "leave out --model and --width"),
    (main, "--model no_such:thing", "--model no_such:thing: No module named 'no_such'"),
    (main, "--model memory_models:absent", "has no attribute 'absent'"),
    (main, "--model memory_models:nothing", "made a NoneType, not a torch.nn.Module"),
    (main, "--model memory_models:broken", "cannot be made: KeyError: 'depth'"),
    (main, "--model memory_models:Decides", "its forward pass cannot be followed without data"),
    (main, "--strategy pp --gpus 8", "8 pipeline stages are more than the model's"),
    (main, "--strategy fsdp --fsdp-wrap Foo", "no module of class 'Foo'"),
    (advise, "", "the following arguments are required: --device-memory"),
    (advise, "--device-memory 0", "argument --device-memory: '0': must be a number over 0"),
    (advise, "--device-memory 80 --network-gb-per-s inf", "must be a number over 0"),
    (advise, "--device-memory 80 --reserve 1", "--reserve 1: must be less than 1"),
    (advise, "--device-memory 80 --model rsenet18", "did you mean 'resnet18'?"),
    (advise, "--device-memory 80 --strategy ddp", "unrecognized arguments: --strategy ddp"),
)


@pytest.mark.parametrize(("command", "words", "line"), REFUSED, ids=[r[1] for r in REFUSED])
def test_what_cannot_be_answered(
    command: Callable[[list[str]], int], words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = command(words.split())
    except SystemExit as stop:
        code = int(stop.code or 0)
    told = capsys.readouterr()
    assert (code, told.out, told.err.count("\n")) == (Exit.USAGE, "", 1)
    assert line in told.err


def test_a_pipeline_that_cannot_be_is_told_below_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--gpus", "8"]) == Exit.OK
    told = capsys.readouterr().out
    assert "  pp: not applicable: 8 pipeline stages are more than the model's 5 layers" in told


def test_the_images_on_the_gpu_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "mlp", "--gpus", "2")
    none, some = (as_json(capsys, *words, "--images", n)["ddp"] for n in ("0", "1000000"))
    assert none["data_mib"] == 0
    grown = some["total_mib"] - none["total_mib"]
    assert grown == pytest.approx(some["data_mib"])
    resident = 10**6 * (32 * 32 * 3 + 8) / 2**20
    assert resident < grown < resident + 500  # the crops are not many
    default = as_json(capsys, *words)["ddp"]["data_mib"]
    assert default == as_json(capsys, *words, "--images", "60000")["ddp"]["data_mib"]
