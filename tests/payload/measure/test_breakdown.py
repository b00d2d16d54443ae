"""Where the time of an iteration goes: the parts add up, grow with what is slow, change nothing."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobkit.metric.line import Record
from support.cuts import final
from support.rigs import Result, Start

SLEEP_S = 0.5  # much longer than an iteration of the small model, and than this machine's noise
RUN = [
    *("--dataset", "synthetic", "--train-samples", "512", "--test-samples", "64", "--epochs", "1"),
    *("--global-batch-size", "32", "--warmup-iterations", "2", "--breakdown-iterations", "5"),
]
# A user's model that slows down one part of every iteration, as the environment says.
SLOW = """
import functools, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from jobkit.payload.data.batches import DeviceData

WHERE, SLEEP_S = os.environ.get("SLOW", ""), float(os.environ.get("SLEEP_S", 0))

def slowed(function):
    @functools.wraps(function)
    def slow(*args, **kwargs):
        time.sleep(SLEEP_S)
        return function(*args, **kwargs)
    return slow

if WHERE == "loader":
    DeviceData.training_batch = slowed(DeviceData.training_batch)
if WHERE == "step":
    torch.optim.SGD.step = slowed(torch.optim.SGD.step)
if WHERE == "reduce":  # fsdp: once a step for a model of one block
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    scatter = _fsdp_collectives.DefaultReduceScatter
    scatter.__call__ = slowed(scatter.__call__)
if WHERE == "cold":  # more passes than the warm-up has; compilation inside of the model is so
    from jobkit.payload.strategies.base import Strategy
    ALONE, passes = Strategy.pass_alone, []
    def cold(self, *args):
        passes.append(1)
        time.sleep(SLEEP_S * (len(passes) <= 4))
        ALONE(self, *args)
    Strategy.pass_alone = cold
if WHERE in ("allreduce", "cold") or (WHERE == "allreduce 1" and os.environ["RANK"] == "1"):
    # ddp: one bucket, so once a step
    init = DistributedDataParallel.__init__
    def with_hook(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.process_group.size() > 1:  # one rank alone has nothing to wait for
            self.register_comm_hook(None, slowed(allreduce_hook))
    DistributedDataParallel.__init__ = with_hook
if WHERE == "wrapper":  # its own work, which no other rank has a part in; once a step
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    FSDPState._pre_forward = slowed(FSDPState._pre_forward)
    DistributedDataParallel._pre_forward = slowed(DistributedDataParallel._pre_forward)
if WHERE.startswith("memory"):
    from jobkit.payload.measure import replica
    replica._MOST_WARM = 3  # passes 4 and 5 belong to iterations, one before and one after
    from jobkit.payload.strategies.base import Strategy
    second = os.environ["RANK"] == "1"
    if WHERE == "memory small":
        replica.free_bytes = lambda device: 1000 if second else 10**12
    PASS, calls = Strategy.pass_alone, []
    def pass_alone(self, *args):
        calls.append(1)
        if second and WHERE == f"memory pass {len(calls)}":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        PASS(self, *args)
    Strategy.pass_alone = pass_alone
    WRAP = Strategy.replica
    def wrap(self, *args):
        if second and WHERE == "memory wrap":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return WRAP(self, *args)
    Strategy.replica = wrap

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.1)
        self.layer = nn.Linear(3072, 10)

    def forward(self, x):
        if WHERE == "rank" and self.training and os.environ["RANK"] == "1":
            time.sleep(SLEEP_S)
        return self.layer(self.drop(self.norm(x)).flatten(1))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow_model.py").write_text(SLOW)
    return folder


@pytest.fixture(scope="module")
def usual(forge: Start, own: Path) -> Callable[..., Record]:
    """The breakdown of a run that nothing slows down, made once for the same words."""

    @functools.cache
    def made(*words: str) -> Record:
        return run(forge, own, 2, *words).record("breakdown")

    return made


def run(forge: Start, own: Path, ranks: int, *words: str, slow: str = "") -> Result:
    env = {"SLOW": slow, "SLEEP_S": str(SLEEP_S)}
    few = ("--train-samples", "256") if slow else ()  # slow iterations, and as many as are needed
    words = (*RUN, "--model", "slow_model:Model", *words, *few)
    done = forge(ranks, *words, cwd=str(own), env=env)
    assert done.codes == [0] * ranks, done.out
    return done


@pytest.fixture(scope="module")
def usual_losses(forge: Start, own: Path) -> Callable[[str], list[float]]:
    """Those of a strategy's run that nothing slows down."""
    return functools.cache(
        lambda strategy: run(forge, own, 2, "--strategy", strategy, slow="none").losses()
    )


PARTS = ("compute_s", "communication_s", "data_wait_s", "other_s")


@pytest.mark.parametrize(
    ("strategy", "slow", "part"),
    [
        ("ddp", "loader", "data_wait_s"),
        ("ddp", "allreduce", "communication_s"),
        ("ddp", "allreduce 1", "communication_s"),  # on one rank, for which the other waits
        ("ddp", "cold", "communication_s"),  # the same, with slow first passes of the replica
        ("ddp", "step", "compute_s"),
        ("fsdp", "reduce", "communication_s"),
        ("ddp", "wrapper", "compute_s"),
        ("fsdp", "wrapper", "compute_s"),
    ],
)
def test_the_slow_part_grows_by_what_it_is_slowed(
    forge: Start, own: Path, usual: Callable[..., Record], strategy: str, slow: str, part: str
) -> None:
    words = ("--strategy", strategy, "--fsdp-wrap-min-parameters", "1000000")
    before = usual(*words)
    slowed = run(forge, own, 2, *words, slow=slow).record("breakdown")
    grown = {name: slowed[name] - before[name] for name in PARTS}
    assert grown.pop(part) == pytest.approx(SLEEP_S, rel=0.25)
    assert all(abs(rest) < 0.25 * SLEEP_S for rest in grown.values()), grown
    total = sum(slowed[name] for name in (*PARTS, "last_rank_wait_s"))
    assert total == pytest.approx(slowed["iteration_s"], rel=0.1)
    if part == "communication_s":
        assert slowed["communication_direct_s"] == pytest.approx(SLEEP_S, rel=0.25)
        assert slowed["certain"] is True


def test_one_slow_rank_is_uneven_load_and_not_communication(forge: Start, own: Path) -> None:
    found = run(forge, own, 2, "--strategy", "ddp", slow="rank").record("breakdown")
    useful = found["compute_s"] + found["other_s"]
    load_balance = useful / found["useful_max_s"]
    communication = found["busy_max_s"] / found["iteration_s"]
    assert load_balance == pytest.approx(0.5, abs=0.15)  # the other rank does next to nothing
    assert communication > 0.8
    # The rank that waits does so in its communication: the record says that too.
    assert found["communication_s"] == pytest.approx(SLEEP_S / 2, rel=0.3)


@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "ddp"),
        ("--strategy", "ddp", "--zero1", "--optimizer", "adamw"),
        ("--strategy", "ddp", "--ddp-comm-hook", "powersgd", "--threads", "1"),
        ("--strategy", "fsdp", "--precision", "bf16", "--accumulate", "2"),
        ("--strategy", "pp"),
    ],
)
def test_measuring_leaves_no_trace_in_the_training(
    forge: Start, own: Path, words: tuple[str, ...]
) -> None:
    finals = []
    for iterations in ("5", "0"):
        more = ("--breakdown-iterations", iterations, "--checkpoint-every", "epoch")
        done = run(forge, own, 2, *words, *more)
        assert len(done.records("breakdown")) == (iterations != "0")
        finals.append((final(done), done.losses()))
    (measured, losses), (plain, plain_losses) = finals
    assert measured.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(measured[name], plain[name])] == []
    assert losses == plain_losses


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("memory small", "rank 1 has 0 MiB free of"),
        ("memory wrap", "rank 1 is out of memory: CUDA out of memory"),
        ("memory pass 1", "rank 1 is out of memory: CUDA out of memory"),  # of the warm-up
        ("memory pass 5", "rank 1 is out of memory: CUDA out of memory"),  # after one
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_run_does_not_end_for_lack_of_memory_to_measure_it(
    forge: Start,
    own: Path,
    usual_losses: Callable[[str], list[float]],
    strategy: str,
    where: str,
    said: str,
) -> None:
    done = run(forge, own, 2, "--strategy", strategy, slow=where)
    assert done.record("run_end")["status"] == "ok"
    assert done.records("breakdown") == []
    (text,) = [r["text"] for r in done.records("message") if "no breakdown" in r["text"]]
    assert said in text
    assert done.losses() == usual_losses(strategy)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_one_rank_alone_has_no_communication(forge: Start, own: Path, strategy: str) -> None:
    found = run(forge, own, 1, "--strategy", strategy).record("breakdown")
    assert found["communication_s"] == 0
    assert found["iterations"] == 3  # the middle ones of five


def test_too_few_iterations_make_no_record(forge: Start, own: Path) -> None:
    few = run(forge, own, 1, "--strategy", "single", "--warmup-iterations", "14")
    assert few.records("breakdown") == []
    assert "no breakdown: 2 iterations" in few.paths.rank_log(0, 0).read_text()


def test_traces_of_the_chosen_iterations_and_ranks(forge: Start, own: Path) -> None:
    words = ("--strategy", "ddp", "--profile", "9-10", "--profile-ranks", "1")
    for _ in range(3):  # torch's profiler once had the events of Gloo's threads alone
        done = run(forge, own, 2, *words)
        trace = json.loads(done.paths.trace(0, 1).read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        if steps := sum(name.startswith("Optimizer.step") for name in names):
            break
    assert steps == 2
    assert not done.paths.trace(0, 0).exists()
    (said,) = [r["text"] for r in done.records("message") if r["level"] == "info"]
    assert "iterations 9 to 10 were profiled, and took" in said
    assert str(done.paths.trace(0, 1)) in said
    assert done.record("breakdown")["iterations"] >= 3  # of those that were not


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--profile", "5-3"), "must be iterations, as 20-22"),
        (("--profile-ranks", "x"), "must be all, or ranks"),
    ],
)
def test_bad_windows_are_one_line(forge: Start, words: tuple[str, ...], said: str) -> None:
    done = forge(1, *RUN, *words)
    assert done.codes == [2]
    assert said in done.out
