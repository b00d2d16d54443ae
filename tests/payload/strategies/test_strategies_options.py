"""The options of the strategies reach torch, and those that mean nothing are refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from jobkit.errors import UsageError
from jobkit.payload import warnings
from jobkit.payload.distributed import Group, RankEnv
from jobkit.payload.model import build_model
from jobkit.payload.strategies import Strategy, strategy_class
from jobkit.payload.strategies.base import make_optimizer
from jobkit.payload.strategies.recompute import checkpoint_blocks
from jobkit.spec.plan import Study
from jobkit.spec.runspec import STRATEGIES as NAMES
from jobkit.spec.runspec import RunSpec
from support.rigs import SMALL, Start

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    group = Group(RankEnv(), CPU, 60.0)
    yield
    group.close()


def made(name: str, model: str = "mlp", place: RankEnv | None = None, **settings: Any) -> Strategy:
    spec = RunSpec(strategy=name, model=model, **settings)
    strategy = strategy_class(name)(spec, place or RankEnv(), CPU)
    strategy.setup(build_model(spec, 10))
    return strategy


def step(strategy: Strategy) -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    strategy.forward_backward(images, labels, 0.25, last=True)


def test_the_launcher_knows_every_strategy_of_the_payload() -> None:
    assert len({strategy_class(name) for name in NAMES}) == len(NAMES)


def test_ddp_is_told_its_options() -> None:
    plain = made("ddp").model
    told = made("ddp", ddp_static_graph=True).model
    seeking = made("ddp", ddp_find_unused_parameters=True).model
    found = [m for m in (plain, told, seeking) if isinstance(m, DistributedDataParallel)]
    assert [m.static_graph for m in found] == [False, True, False]
    assert [m.find_unused_parameters for m in found] == [False, False, True]


@pytest.mark.parametrize(("hook", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_hook_sends_gradients_in_its_type(hook: str, dtype: torch.dtype) -> None:
    plain, strategy = made("ddp"), made("ddp", ddp_comm_hook=hook)
    step(plain)
    step(strategy)
    for name, gradient in strategy.whole(gradients=True).items():
        assert torch.equal(gradient, plain.whole(gradients=True)[name].to(dtype).float())
    assert f"ddp: gradients are sent in {hook}" in strategy.describe()


def test_powersgd_lowers_the_rank_of_a_gradient_after_its_start() -> None:
    strategy = made("ddp", ddp_comm_hook="powersgd", ddp_powersgd_rank=1, ddp_powersgd_start=2)
    ranks = []
    for _ in range(3):
        step(strategy)
        gradient = strategy.whole(gradients=True)["1.weight"]
        ranks.append(int(torch.linalg.matrix_rank(gradient, rtol=1e-4)))
        strategy.model.zero_grad()
    assert min(ranks[:2]) > 1
    assert ranks[2] == 1


def test_zero1_shards_the_optimizer() -> None:
    optimizer = make_optimizer(made("ddp", zero1=True, optimizer="adamw"))
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    assert isinstance(optimizer.optim, torch.optim.AdamW)


def test_fsdp_wraps_the_classes_that_are_named() -> None:
    strategy = made("fsdp", model="cnn", fsdp_wrap="Stage,Conv2d", fsdp_wrap_min_parameters=10**9)
    head, *lines = strategy.describe()
    assert head == "fsdp: shard groups, parameters in all, and on this rank"
    assert [line.split(":")[0] for line in lines] == [
        *("  stage1", "    stage1.conv", "  stage2", "    stage2.conv"),
        *("  stage3", "    stage3.conv", "  root"),
    ]
    assert lines[0] == "  stage1: 0, here 0, 0 bytes"  # its convolution has all it had
    assert lines[1] == "    stage1.conv: 896, here 896, 3,584 bytes"


def test_fsdp_gathers_ahead() -> None:
    strategy = made("fsdp", model="cnn", fsdp_prefetch=2, fsdp_group_mib=0.0)
    groups = [group for group, _ in strategy.groups if not group.root]  # type: ignore[attr-defined]
    states = [group.modules[0]._get_fsdp_state() for group in reversed(groups)]
    assert [len(s._states_to_forward_prefetch) for s in states] == [2, 2, 1, 0]
    assert [len(s._states_to_backward_prefetch) for s in states] == [0, 1, 2, 2]
    assert states[0]._states_to_forward_prefetch[0] is states[1]


def test_fsdp_hybrid_holds_a_copy_in_each_node(forge: Start) -> None:
    words = [*SMALL, "--model", "mlp", "--epochs", "1", "--strategy", "fsdp"]
    done = forge(4, *words, "--fsdp-hybrid-replicas", "2", "--fsdp-group-mib", "0")
    assert done.codes == [0] * 4, done.out
    assert "fsdp: 2 replicas, each sharded over 2 ranks" in done.out
    # Half of the 512 rows of 3,072 weights, and half of the bias.
    assert "  1: 1,573,376, here 786,688, 3,146,752 bytes" in done.out


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        block = nn.Sequential(nn.Linear(3072, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        super().__init__(nn.Flatten(), block, nn.Linear(8, 10))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "dp"])
def test_every_strategy_checkpoints_when_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, calls = nn.functional.linear, []
    monkeypatch.setattr(nn.functional, "linear", lambda *a: (calls.append(1), linear(*a))[1])
    step(made(name))
    plain, calls[:] = len(calls), []
    step(made(name, activation_checkpointing=True))
    assert len(calls) > plain > 0


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
    assert plain.state_dict().keys() == thrifty.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, thrifty.state_dict()[name]), name


FOUR = RankEnv(world_size=4, local_world_size=4)


@pytest.mark.parametrize(
    ("name", "settings", "place", "line"),
    [
        ("ddp", {"sync_batchnorm": True}, None, "torch has it for GPUs only"),
        ("ddp", {"ddp_static_graph": True, "accumulate": 2}, None, "--ddp-static-graph with"),
        (
            "ddp",
            {"ddp_static_graph": True, "ddp_find_unused_parameters": True},
            None,
            "leave out --ddp-find-unused",
        ),
        ("fsdp", {"fsdp_wrap": "Conv"}, None, "no module of class 'Conv' .it has: Flatten, Lin"),
        ("fsdp", {"fsdp_hybrid_replicas": 3}, FOUR, "3 does not divide the 4 ranks"),
        ("dp", {"compile": True}, None, "--compile, strategy dp: the threads would"),
        ("dp", {"activation_checkpointing": True}, None, "--activation-checkpointing, strategy dp"),
        ("pp", {"compile": True}, None, "--compile, strategy pp: its stages"),
        ("mp", {"precision": "fp16"}, None, "--precision fp16, strategy mp: each stage would"),
        ("pp", {"pipeline_stages": 3}, FOUR, "4 ranks do not make whole pipelines"),
        ("pp", {"microbatches": 3}, None, "--microbatches 3 does not divide .* of 512"),
        ("pp", {"microbatches": 2}, FOUR, "1f1b needs one at least for each of 4 stages"),
        ("pp", {"pipeline_stages": 2, "global_batch_size": 9}, FOUR, "does not divide"),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(
    name: str, settings: dict[str, Any], place: RankEnv | None, line: str
) -> None:
    with pytest.raises(UsageError, match=line):
        made(name, place=place, **settings)


@pytest.mark.parametrize("name", ["single", "dp"])
def test_one_process_is_one_rank(name: str) -> None:
    with pytest.raises(UsageError, match=f"strategy '{name}' runs at 1 rank, not 2; use ddp"):
        RunSpec(strategy=name, ranks_per_node=2)
    plan = Study(name="s", strategies=(name, "ddp"), gpus=(1, 2)).expand()
    assert plan.notes == (f"{name} runs at 1 rank only: not planned at 2",)
    assert len(plan.runs) == 3


def test_dp_on_the_cpu_says_that_it_is_single() -> None:
    strategy = made("dp")
    assert strategy.describe() == ["dp: on the CPU this is the same as single"]
    assert not isinstance(strategy.model, nn.DataParallel)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"zero1": True, "strategy": "fsdp"}, "--zero1 has no effect: it needs strategy ddp"),
        ({"microbatches": 4}, "--microbatches has no effect: it needs strategy pp"),
        ({"pipeline_split": "a"}, "--pipeline-split has no effect: it needs strategy mp or pp"),
        (
            {"pipeline_schedule": "gpipe", "strategy": "mp"},
            "--pipeline-schedule has no effect: it needs strategy pp",
        ),
        (
            {"ddp_powersgd_rank": 4},
            "--ddp-powersgd-rank has no effect: it needs --ddp-comm-hook powersgd",
        ),
    ],
)
def test_an_option_without_effect_is_told(settings: dict[str, Any], line: str) -> None:
    assert line in warnings.without_effect(RunSpec(**settings), "cpu")


def test_batch_normalisation_is_told_where_it_depends_on_the_ranks() -> None:
    said = {
        name: warnings.of_batch_norm(True, RunSpec(strategy=name, ranks_per_node=2))
        for name in ("ddp", "pp", "mp")
    }
    assert "over each rank's own part" in said["ddp"][0]
    assert "over each microbatch" in said["pp"][0]
    assert said["mp"] == []
    assert warnings.of_batch_norm(True, RunSpec(ranks_per_node=2, sync_batchnorm=True)) == []
    assert warnings.of_batch_norm(False, RunSpec(ranks_per_node=2)) == []
