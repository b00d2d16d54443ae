"""Where the time of an iteration goes, what is timed, and that measuring changes nothing."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobkit.checks.collectives import Exchange, Team, in_a_row
from jobkit.errors import UsageError
from jobkit.metric.kinds import Record
from jobkit.payload import host
from jobkit.payload.batches import Batches, DeviceData, Step
from jobkit.payload.clock import Clock, Stopwatch
from jobkit.payload.data import Dataset, synthetic
from jobkit.payload.host import PeakMemory
from jobkit.payload.measure.peak import OwnPeak
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.base import make_optimizer
from jobkit.payload.strategies.ddp import _empty_in_fp32
from jobkit.payload.strategies.local import Single
from jobkit.payload.train import Trainer
from jobkit.payload.warnings import too_short
from jobkit.spec.runspec import RunSpec
from support.cuts import final
from support.fake_cuda import GPU
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

WHERE, SLEEP_S = os.environ.get("SLOW", ""), float(os.environ.get("SLEEP_S", 0))

def slowed(function):
    @functools.wraps(function)
    def slow(*args, **kwargs):
        time.sleep(SLEEP_S)
        return function(*args, **kwargs)
    return slow

if WHERE == "step":
    torch.optim.SGD.step = slowed(torch.optim.SGD.step)
if WHERE == "reduce":  # fsdp: once a step for a model of one block
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    scatter = _fsdp_collectives.DefaultReduceScatter
    scatter.__call__ = slowed(scatter.__call__)
if WHERE == "allreduce" or (WHERE == "allreduce 1" and os.environ["RANK"] == "1"):
    # ddp: one bucket, so once a step
    init = DistributedDataParallel.__init__
    def with_hook(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.process_group.size() > 1:  # one rank alone has nothing to wait for
            self.register_comm_hook(None, slowed(allreduce_hook))
    DistributedDataParallel.__init__ = with_hook
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


LONG = pytest.mark.long
SLOWED = [("ddp", "allreduce 1", "communication_s"), ("ddp", "step", "compute_s")]
ALSO = [("ddp", "allreduce", "communication_s"), ("fsdp", "reduce", "communication_s")]


@pytest.mark.parametrize(
    ("strategy", "slow", "part"), [*SLOWED, *(pytest.param(*case, marks=LONG) for case in ALSO)]
)
def test_the_slow_part_grows_by_what_it_is_slowed(
    forge: Start, own: Path, usual: Callable[..., Record], strategy: str, slow: str, part: str
) -> None:
    words = ("--strategy", strategy)
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


@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "ddp"),
        ("--strategy", "fsdp", "--precision", "bf16", "--accumulate", "2"),
        pytest.param(("--strategy", "pp"), marks=LONG),
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
    ("strategy", "where", "said"),
    [
        ("fsdp", "memory wrap", "rank 1 is out of memory: CUDA out of memory"),
        ("ddp", "memory pass 5", "rank 1 is out of memory: CUDA out of memory"),  # after one
        pytest.param("ddp", "memory small", "rank 1 has 0 MiB free of", marks=LONG),
    ],
)
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


@pytest.mark.parametrize("strategy", ["ddp"])
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
    ("given", "said"),
    [
        ({"profile": "5-3"}, "must be iterations, as 20-22"),
        ({"profile_ranks": "x"}, "must be all, or ranks"),
    ],
)
def test_bad_windows_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RunSpec(**given)


MIB, NAN = 2**20, float("nan")


class Memory:
    """A process's memory: what is held, and the peaks since the last reset."""

    def __init__(self) -> None:
        self.held = self.peak = self.reserved = 0

    def hold(self, mib: int) -> None:
        self.held += mib
        self.peak, self.reserved = max(self.peak, self.held), max(self.reserved, self.held)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    made = Memory()

    def reset(device: torch.device) -> None:
        made.peak = made.reserved = made.held

    def stats(device: torch.device) -> None:
        made.peak = made.held

    def empty(size: int, **_: object) -> None:
        made.hold(size // MIB)
        made.held -= size // MIB

    monkeypatch.setattr(
        host, "peak_memory_mib", lambda device: PeakMemory(made.peak, made.reserved, made.peak)
    )
    monkeypatch.setattr(host, "reset_peak_memory", reset)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: made.reserved * MIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", stats)
    monkeypatch.setattr(torch, "empty", empty)
    return made


def step(memory: Memory, mib: int = 100) -> None:
    memory.hold(mib)
    memory.held -= mib


def test_a_peak_is_that_of_the_training_alone(memory: Memory) -> None:
    peak = OwnPeak(torch.device("cuda", 0))
    memory.hold(50)
    step(memory)
    assert peak.now() == PeakMemory(150, 150, 150)
    peak.pause()
    memory.hold(900)
    step(memory)
    assert peak.now() == PeakMemory(150, 150, 150)  # an epoch may end with the replica there
    memory.held -= 900
    peak.resume()
    assert memory.reserved == 150  # reserved again, so that no iteration has to
    assert peak.now() == PeakMemory(150, 150, 150)
    step(memory, 130)
    assert peak.now() == PeakMemory(180, 180, 180)


def test_on_the_cpu_only_resident_memory_is_known(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(host, "peak_memory_mib", lambda _: PeakMemory(NAN, NAN, memory.peak))
    never: Callable[..., None] = lambda *_: pytest.fail("no GPU")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_reserved", never)
    peak = OwnPeak(torch.device("cpu"))
    step(memory, 70)
    peak.pause()
    memory.hold(900)
    memory.held -= 900
    peak.resume()
    found = peak.now()
    assert found.resident == 70
    assert found.allocated != found.allocated  # NaN


CPU = torch.device("cpu")
COMPILING_S, STEP_S = 0.3, 0.002


@pytest.mark.parametrize(("compiles", "images", "seconds"), [(True, 24, 0.0), (False, 27, 0.3)])
def test_compiling_for_the_last_batch_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, images: int, seconds: float
) -> None:
    """8 + 8 + 8 + 3 timed samples after two iterations of warm-up; the last 3 are another size."""
    spec, place = RunSpec(strategy="single", model="mlp", warmup_iterations=2), RankEnv()
    strategy = Single(spec, place, CPU)
    strategy.setup(build_model(spec, 10))
    train, test, classes = synthetic(43, 10)
    trainer = Trainer(
        spec=RunSpec(strategy="single", compile=compiles, warmup_iterations=2),
        group=SimpleNamespace(place=place, device=CPU),  # type: ignore[arg-type]
        data=DeviceData(Dataset(train, test, classes), CPU, seed=0, augmentation=None),
        batches=Batches(43, 8, 0, 1, 1, 0),
        strategy=strategy,
        optimizer=make_optimizer(strategy),
        report=SimpleNamespace(),  # type: ignore[arg-type]
        classes=10,
    )
    sizes: set[int] = set()
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step_and_compile(step: Step, epoch: int, clock: Clock) -> torch.Tensor:
        now[0] += STEP_S if step.global_count in sizes else COMPILING_S
        sizes.add(step.global_count)
        clock.images += step.global_count
        return torch.zeros(())

    monkeypatch.setattr(trainer, "_train_step", step_and_compile)
    clock, _, _ = trainer.train_epoch(0, lambda _: None)
    assert clock.images == images
    assert seconds <= clock.elapsed_s() < seconds + COMPILING_S
    again, _, _ = trainer.train_epoch(1, lambda _: None)
    assert again.images == 43  # no size is new


def test_operations_in_a_row_wait_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name in ("synchronise", "barrier"):
        monkeypatch.setattr(Team, name, lambda self, name=name: calls.append(name))
    monkeypatch.setattr(Team, "largest", lambda self, values: [2 * v for v in values])

    def run() -> None:
        calls.append("run")
        now[0] += 0.01

    made = Exchange(8, lambda: calls.append("prepare"), run, lambda: True)
    taken = in_a_row(made, Team((0, 1), 0, GPU), 5)
    assert calls == ["prepare", "synchronise", "barrier", *["run"] * 5, "synchronise"]
    assert taken == pytest.approx(0.02)  # of one, the maximum over the ranks


def test_an_empty_batch_meets_sync_batch_norm_in_fp32() -> None:
    norm = torch.nn.SyncBatchNorm(3)
    (empty,) = _empty_in_fp32(norm, (torch.zeros(0, 3, 4, 4, dtype=torch.bfloat16),))
    assert empty.dtype is torch.float32
    some = torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16)
    assert _empty_in_fp32(norm, (some,))[0] is some


@pytest.mark.parametrize(
    ("seconds", "device", "told"), [(0.12, GPU, True), (1.0, GPU, False), (0.12, CPU, False)]
)
def test_an_epoch_that_is_too_short_is_told(
    seconds: float, device: torch.device, told: bool
) -> None:
    assert ("an epoch takes 0.12 s" in too_short(seconds, device)) is told


def test_the_stopwatch_counts_from_the_last_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("jobkit.payload.clock.time.perf_counter", lambda: now[0])
    watch = Stopwatch(torch.device("cpu"))
    watch.on = True
    with watch.part("passes"):
        with watch.part("waited"):
            now[0] += 1
        now[0] += 2
        watch.mark("waited")
        now[0] += 4
        watch.mark("waited")
        now[0] += 8
    with watch.part("step"):  # no mark is left over
        now[0] += 16
    assert watch.take() == {"passes": 15.0, "waited": 9.0, "step": 16.0}
