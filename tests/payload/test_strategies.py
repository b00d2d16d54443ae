"""What the strategies ask of torch, in one process: options, groups, hooks and operations."""

import re
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from jobkit.errors import UsageError
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.resume import _prime
from jobkit.payload.strategies import Strategy, base, ddp, strategy_class
from jobkit.payload.strategies.blocks import checkpoint_blocks
from jobkit.payload.strategies.fsdp import FSDP
from jobkit.payload.strategies.pipeline import Pipeline
from jobkit.spec.runspec import STRATEGIES as NAMES
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import GPU, Operations

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("alone")


def made(name: str, model: str = "mlp", place: RankEnv | None = None, **settings: Any) -> Strategy:
    spec = RunSpec(strategy=name, model=model, **settings)
    strategy = strategy_class(name)(spec, place or RankEnv(), CPU)
    strategy.setup(build_model(spec, 10))
    return strategy


def step(strategy: Strategy, micro_batches: int = 1) -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for j in range(micro_batches):
        strategy.forward_backward(images, labels, 0.25, last=j == micro_batches - 1)


def test_fsdp_wraps_the_classes_that_are_named() -> None:
    strategy = made("fsdp", model="cnn", fsdp_wrap="Stage,Conv2d")
    assert isinstance(strategy, FSDP)
    names = {module: name for name, module in strategy.model.named_modules()}
    found = [(names[group.modules[0]], group.parameters) for group in strategy.groups]
    assert found[0] == ("stage3.conv", 73_856) and found[-1][0] == ""
    assert [n for n, count in found if count == 0] == [f"stage{i}" for i in (3, 2, 1)]


def test_fsdp_gathers_ahead() -> None:
    strategy = made("fsdp", model="cnn", fsdp_prefetch=2, fsdp_group_mib=0.0)
    groups = [group for group in strategy.groups if not group.root]  # type: ignore[attr-defined]
    states = [group.modules[0]._get_fsdp_state() for group in reversed(groups)]
    assert [len(s._states_to_forward_prefetch) for s in states] == [2, 2, 2, 1, 0]
    assert [len(s._states_to_backward_prefetch) for s in states] == [0, 1, 2, 2, 2]
    assert states[0]._states_to_forward_prefetch[0] is states[1]


def test_the_docstring_names_every_hook() -> None:
    public = {n for n, value in vars(Strategy).items() if callable(value) and n[0] != "_"}
    absent = public - {"setup", "placed", "loss", *re.findall(r"\w+", Strategy.__doc__ or "")}
    assert not absent, f"add to the docstring of Strategy in payload/strategies/base.py: {absent}"


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        block = nn.Sequential(nn.Linear(3072, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        super().__init__(nn.Flatten(), block, nn.Linear(8, 10))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_bare_model(name: str) -> None:
    """Also of a child that is called as torch's wrappers call theirs."""
    model = nn.Sequential(OrderedDict(module=Normalised()))
    parameters, buffers = list(dict(model.named_parameters())), list(dict(model.named_buffers()))
    strategy = strategy_class(name)(RunSpec(strategy=name), RankEnv(), CPU)
    strategy.setup(model)
    assert list(strategy.named_parameters()) == parameters
    assert list(strategy.named_buffers()) == buffers


def test_checkpointing_computes_a_block_twice_and_its_statistics_once() -> None:
    torch.manual_seed(3)
    plain, thrifty = Normalised(), Normalised()
    thrifty.load_state_dict(plain.state_dict())
    checkpoint_blocks(thrifty)
    calls: list[nn.Module] = []
    thrifty[1][0].register_forward_hook(lambda module, *_: calls.append(module))
    for model in (plain, thrifty):
        torch.manual_seed(4)
        model(torch.rand(6, 3, 32, 32)).square().sum().backward()
    assert len(calls) == 2
    for one, other in zip(plain.parameters(), thrifty.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    assert list(plain.state_dict()) == list(thrifty.state_dict())
    assert all(map(torch.equal, plain.state_dict().values(), thrifty.state_dict().values()))


def test_the_blocks_of_a_list_are_computed_twice_too() -> None:
    model, calls = nn.Module(), list[nn.Module]()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "ab")
    checkpoint_blocks(model)
    x = torch.rand(5, 4)
    for block in model.blocks:
        block[0].register_forward_hook(lambda module, *_: calls.append(module))
        x = block(x)
    x.sum().backward()
    assert len(calls) == 4
    # torch.compile takes no context.
    assert {*model.blocks[0].forward.keywords} == {"use_reentrant"}


def test_batch_normalisation_over_all_ranks_does_not_depend_on_their_number() -> None:
    for norm, depends in ((nn.BatchNorm2d, True), (nn.SyncBatchNorm, False)):
        strategy = strategy_class("single")(RunSpec(strategy="single"), RankEnv(), CPU)
        strategy.setup(norm(3))
        assert strategy.normalised is depends


FOUR = RankEnv(world_size=4, local_world_size=4)


@pytest.mark.parametrize(
    ("name", "settings", "place", "line"),
    [
        ("fsdp", {"fsdp_wrap": "Conv"}, None, "no module of class 'Conv' .it has: Flatten, Lin"),
        ("fsdp", {"fsdp_hybrid_replicas": 3}, FOUR, "3 does not divide the 4 ranks"),
        ("dp", {"compile": True}, None, "--compile, strategy dp: the threads would"),
        ("dp", {"activation_checkpointing": True}, None, "--activation-checkpointing, strategy dp"),
        ("pp", {"compile": True}, None, "--compile, strategy pp: its stages"),
        (
            "single",
            {"compile": True, "activation_checkpointing": True, "model": "fast_cnn"},
            None,
            "a model with batch normalisation that is recomputed: leave one out",
        ),
        ("mp", {"precision": "fp16"}, None, "--precision fp16, strategy mp: each stage would"),
        ("pp", {"pipeline_stages": 3}, FOUR, "4 ranks do not make whole pipelines"),
        ("pp", {"microbatches": 3}, None, "--microbatches 3 does not divide .* of 512"),
        ("pp", {"microbatches": 2}, FOUR, "1f1b needs one at least for each of 4 stages"),
        ("pp", {"pipeline_stages": 2, "global_batch_size": 9}, FOUR, "does not divide"),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(name, settings, place, line) -> None:
    with pytest.raises(UsageError, match=line):
        made(name, place=place, **settings)


def test_ddp_reduces_in_the_last_micro_batch_only() -> None:
    strategy, calls = made("ddp"), []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.is_last())
        return allreduce_hook(dist.group.WORLD, bucket)

    strategy.model.register_comm_hook(None, hook)  # type: ignore[operator]
    step(strategy, 3)
    assert calls.count(True) == 1


def test_fsdp_reduces_in_the_last_micro_batch_only() -> None:
    strategy = made("fsdp")
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for last in (False, False, True):
        strategy.forward_backward(images, labels, 0.25, last)
        # A shard has its gradient once it has been reduced.
        assert all((p.grad is not None) is last for p in strategy.model.parameters())


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_a_clipped_step_is_as_long_as_the_clip(name: str) -> None:
    strategy = made(name, clip_norm=1e-2, lr=1.0, momentum=0.0, weight_decay=0.0)
    before = strategy.whole()
    step(strategy)
    strategy.optimizer_step(strategy.make_optimizer())
    moved = [tensor - before[name] for name, tensor in strategy.whole().items()]
    assert torch.cat([m.flatten() for m in moved]).norm().item() == pytest.approx(1e-2, rel=1e-3)
    assert all(p.grad is None for p in strategy.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resume_makes_the_optimizers_state_by_a_step_of_the_strategy(precision: str) -> None:
    strategy = made("single", precision=precision, clip_norm=1.0)
    before, optimizer = strategy.whole(), strategy.make_optimizer()
    strategy.optimizer_step = Mock(wraps=strategy.optimizer_step)  # type: ignore[method-assign]
    trainer: Any = SimpleNamespace(strategy=strategy, optimizer=optimizer, loss_sum=torch.zeros(()))
    _prime(trainer)
    strategy.optimizer_step.assert_called_once_with(optimizer)
    assert strategy.optimizer_state(optimizer).keys() == before.keys()
    assert all(map(torch.equal, before.values(), strategy.whole().values()))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("single", "adam"), ("ddp", "sgd"), ("ddp", "adamw"), ("fsdp", "sgd"), ("fsdp", "adamw")],
)
def test_the_optimizer_is_fused_where_torch_has_that(name: str, optimizer: str) -> None:
    """FSDP's SGD, which torch has no fused rule for, updates all at once (foreach) on GPUs."""
    strategy = made(name, optimizer=optimizer)
    if (name, optimizer) == ("fsdp", "sgd"):
        assert strategy.make_optimizer().defaults["foreach"] is False
        strategy.device = GPU
    kind = strategy.make_optimizer()
    strategy.device = CPU
    step(strategy)
    with Operations() as seen:
        strategy.optimizer_step(kind)
    word = "_foreach" if (name, optimizer) == ("fsdp", "sgd") else "_fused"
    assert sum(word in operation for operation in seen.names) in range(1, 4), seen.names


def test_groups_of_ranks_have_the_timeout_of_the_run() -> None:
    strategy = made("pp", timeout_s=77.0)
    assert isinstance(strategy, Pipeline) and strategy.group and strategy.data_group
    groups = (strategy.group, strategy.data_group)
    seconds = {g._get_backend(CPU).options._timeout.total_seconds() for g in groups}
    assert seconds == {77.0}


@pytest.mark.parametrize("device", [GPU, CPU])
def test_what_ddp_is_told(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Buffers are broadcast in the forward pass on CPUs only."""
    seen: dict[str, object] = {}
    made = SimpleNamespace()
    told_ddp = lambda model, **given: seen.update(given) or made  # noqa: E731
    monkeypatch.setattr(ddp, "DistributedDataParallel", told_ddp)
    monkeypatch.setattr(ddp.DDP, "placed", lambda self, model: model)
    spec = RunSpec(ddp_find_unused_parameters=True, ddp_bucket_mib=3.0)
    ddp.DDP(spec, RankEnv(), device).wrap(nn.Identity())
    assert made.broadcast_buffers is (device == CPU)
    assert seen.pop("device_ids") == (None if device == CPU else [device.index])
    told = {"bucket_cap_mb": 3.0, "find_unused_parameters": True}
    assert seen == told | {"gradient_as_bucket_view": True}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_mode_of_the_compiler_is_passed_on(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Eagerly, and with a step's beginning marked where the mode has CUDA graphs."""
    seen: list[object] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: seen.append(given))
    mark = lambda: seen.append("step")  # noqa: E731
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    step(made("single", compile=True, compile_mode=mode))
    assert seen == [{"mode": mode}, *(["step"] if mode != "default" else [])]


def test_what_is_read_whole_is_on_the_cpu() -> None:
    """Where tensors of several GPUs are compared, and sent as objects."""
    with FakeTensorMode(), GPU:
        assert base.full(torch.empty(2)).device.type == "cpu"


def test_all_groups_of_a_mesh_have_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, float]()
    mesh = SimpleNamespace(get_all_groups=lambda: ["replicas", "shards"])
    monkeypatch.setattr(base, "init_device_mesh", lambda *_, **__: mesh)
    later = lambda time, group: given.update({group: time.total_seconds()})  # noqa: E731
    monkeypatch.setattr(dist, "set_timeout", later, raising=False)
    strategy = FSDP(RunSpec(strategy="fsdp", timeout_s=7.0), RankEnv(), CPU)
    assert base.make_mesh(strategy, a=1, b=1) is mesh and given == {"replicas": 7, "shards": 7}
