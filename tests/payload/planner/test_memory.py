"""`jobkit memory`: what it predicts is what torch's profiler measures; known sums; bad input."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from jobkit.errors import Exit
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies import strategy_class
from jobkit.planner.activations import bytes_of, follow
from jobkit.planner.advise import main as advise
from jobkit.planner.footprint import Footprint, Subject, footprint, footprints, step_messages
from jobkit.planner.memory import main
from jobkit.spec.runspec import RunSpec
from jobkit.spec.traffic import Message
from support import zero1
from support.refusals import refusal

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

def broken():
    raise KeyError("depth")
"""


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def first_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """One rank that is alone, or the first of several whose collectives send nothing."""
    world = request.param
    kind, store = ("gloo", dist.HashStore()) if world == 1 else ("fake", FakeStore())
    dist.init_process_group(kind, store=store, rank=0, world_size=world)
    yield
    dist.destroy_process_group()


def measured(spec: RunSpec) -> int:
    """Bytes of this rank's tensors at the peak of a training step, by torch's profiler."""
    place = RankEnv(world_size=spec.world_size, local_world_size=spec.world_size)
    strategy = strategy_class(spec.strategy)(spec, place, torch.device("cpu"))
    strategy.setup(build_model(spec, 10))
    optimizer = strategy.make_optimizer()
    count = spec.steps_batch_size // spec.world_size // spec.accumulate
    images, labels = torch.rand(count, 3, 32, 32), torch.zeros(count, dtype=torch.int64)

    def step() -> None:
        for j in range(spec.accumulate):
            last = j == spec.accumulate - 1
            strategy.forward_backward(images, labels, 1 / count, last)
        strategy.optimizer_step(optimizer)

    step()
    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*strategy.model.parameters(), *strategy.model.buffers(), *states, images]
    held = bytes_of([t.to_local() if hasattr(t, "to_local") else t for t in tensors])
    if spec.strategy == "ddp":  # its buckets
        held += bytes_of([*strategy.model.parameters()])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return held + peak


WIDE = {"model": "cnn", "width": 4}
MEASURED = {
    "single cnn": (1, {"global_batch_size": 64}),
    "single mlp adamw": (1, {"model": "mlp", "global_batch_size": 512, "optimizer": "adamw"}),
    "single bf16": (1, {"model": "resnet18", "global_batch_size": 16, "precision": "bf16"}),
    "single checkpointing": (1, {"activation_checkpointing": True, "global_batch_size": 64}),
    "ddp": (1, {"strategy": "ddp", "global_batch_size": 32, **WIDE}),
    "ddp accumulate": (1, {"strategy": "ddp", "global_batch_size": 256, "accumulate": 4}),
    "fsdp": (4, {"strategy": "fsdp", "global_batch_size": 64, "optimizer": "adamw", **WIDE}),
    "fsdp bf16": (
        2, {"strategy": "fsdp", "model": "resnet18", "global_batch_size": 32, "precision": "bf16"}),
    "fsdp accumulate": (4, {"strategy": "fsdp", "global_batch_size": 128, "accumulate": 2, **WIDE}),
    "hsdp": (4, {"strategy": "fsdp", "fsdp_hybrid_replicas": 2, "global_batch_size": 64, **WIDE}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("first_rank", "settings"), MEASURED.values(), ids=MEASURED, indirect=["first_rank"]
)
def test_what_is_predicted_is_measured(first_rank: None, settings: dict[str, Any]) -> None:
    spec = RunSpec(**{"strategy": "single", "ranks_per_node": dist.get_world_size(), **settings})
    assert footprint(spec, Subject()).total == pytest.approx(measured(spec), rel=0.1)


def test_seven_billion_parameters_under_adam(capsys: pytest.CaptureFixture[str]) -> None:
    """26.1 + 26.1 + 52.2 = 104 GiB on one GPU, 13 on each of eight: a textbook example."""
    assert main(["--parameters", "7e9", "--optimizer", "adamw", "--gpus", "8"]) == Exit.OK
    out = capsys.readouterr().out
    lines = out.split("\n\n")[1].splitlines()[1:]
    rows = {line[3:].split("  ")[0]: line[3:].split("  ", 1)[1].split() for line in lines}
    assert rows.keys() >= {"single", "fsdp, gradients and optimizer", "fsdp, hybrid", "mp", "pp"}
    assert rows["ddp"] == ["26.1", "26.1", "52.2", "0", "-", "0", "0", "104"]
    assert rows["fsdp, full shard"][-1] == "13"
    assert [line.split()[1] for line in lines if line[0] == "*"] == ["ddp"]
    assert "of this one only the size is known" in out.splitlines()[-1]
    assert main(["--gpus", "8"]) == Exit.OK
    told = capsys.readouterr().out
    assert "  pp: not applicable: 8 pipeline stages are more than the model's 5 layers" in told


def test_a_strategy_may_shard_the_optimizer_alone(monkeypatch, capsys) -> None:
    zero1.register(monkeypatch)
    (plain, sharded), _ = footprints(RunSpec(ranks_per_node=4), Subject(), ("ddp", "zero1"))
    assert plain.optimizer == 4 * sharded.optimizer > 0
    assert plain.total - sharded.total == plain.optimizer - sharded.optimizer
    sent = [step_messages(each, Subject()) or [] for each in (plain, sharded)]
    assert sent[1] == [*sent[0], Message("broadcast", plain.parameters, sent[0][0].scope)]
    assert advise(["--model", "mlp", "--gpus-per-node", "4", "--device-memory", "80"]) == Exit.OK
    assert "zero1" in capsys.readouterr().out


def of(**settings: Any) -> Footprint:
    return footprint(RunSpec(**{"model": "mlp", **settings}), Subject())


def test_gpipe_keeps_every_microbatch_and_1f1b_one_a_stage() -> None:
    settings = {"model": "cnn", "strategy": "pp", "ranks_per_node": 2, "microbatches": 8}
    kinds = ("1f1b", "gpipe")
    one, all_ = (of(pipeline_schedule=kind, **settings).activations or 0 for kind in kinds)
    assert 0 < one < all_


def test_offloaded_state_is_on_the_host() -> None:
    here, there = (
        of(strategy="fsdp", ranks_per_node=2, fsdp_cpu_offload=offload) for offload in (False, True)
    )
    state = here.parameters + here.gradients + here.optimizer
    assert here.total - there.total == state > 0


def test_a_factory_that_looks_at_numbers_is_called_for_real() -> None:
    spec = RunSpec(model="memory_models:Looks")
    (stage,) = follow(spec, 4, 10, new=True)
    assert (stage.taken, stage.parameters) == (4 * 3072 * 4, (3072 * 10 + 10) * 4)


REFUSED = (
    (main, "--model ccn", "unknown model 'ccn'; did you mean 'cnn'?"),
    (main, "--gpus 0", "argument --gpus: '0': must be a whole number, 1 or more"),
    (main, "--gpus 3 --nodes 2", "--gpus 3: 2 nodes cannot have the same number each"),
    (main, "--parameters 7e9 --width 2", "leave out --model and --width"),
    (main, "--model memory_models:broken", "cannot be made: KeyError: 'depth'"),
    (main, "--model memory_models:Decides", "its forward pass cannot be followed without data"),
    (main, "--strategy pp --gpus 8", "8 pipeline stages are more than the model's"),
    (main, "--strategy fsdp --fsdp-wrap Foo", "no module of class 'Foo'"),
    (advise, "", "the following arguments are required: --device-memory"),
    (advise, "--device-memory 0", "argument --device-memory: '0': must be a number over 0"),
    (advise, "--device-memory 80 --reserve 1", "--reserve: '1': must be a number, 0 or more"),
    (advise, "--device-memory 80 --strategy ddp", "unrecognized arguments: --strategy ddp"),
)


@pytest.mark.parametrize(("command", "words", "line"), REFUSED, ids=[r[1] for r in REFUSED])
def test_what_cannot_be_answered(command, words, line, capsys) -> None:
    assert line in refusal(command, words.split(), capsys)


def test_the_images_on_the_gpu_are_counted() -> None:
    spec = RunSpec(model="mlp", ranks_per_node=2)
    none, some = (footprint(spec, Subject(images=n)) for n in (0, 10**6))
    assert none.data == 0
    assert some.total - none.total == some.data
    resident = 10**6 * (32 * 32 * 3 + 8)
    assert resident <= some.data < resident + 500 * 2**20  # the crops are not many
