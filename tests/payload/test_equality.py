"""Any number of ranks makes the steps that one process would make."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.rigs import NO_BREAKDOWN, Result, Start

pytestmark = pytest.mark.on_device
# A GPU's library chooses another kernel, with another order of sums, for another batch size.
ROUNDING = 10 if os.environ.get("JOBKIT_TEST_DEVICE") == "cuda" else 1
# 100 samples in batches of 23: neither 2 nor 3 ranks divide them, and the last has 8.
UNEVEN = [
    "--dataset",
    "synthetic",
    "--train-samples",
    "100",
    "--test-samples",
    "101",
    *NO_BREAKDOWN,
]
PLAIN = [*UNEVEN, "--epochs", "2", "--global-batch-size", "23", "--eval-batch-size", "17"]
WAYS = {
    "sgd": ["--lr", "0.1"],
    # 5 microbatches of 4 or 5 samples; at 3 ranks of 1 or 2, and none in the last batch.
    "accumulate": ["--lr", "0.1", "--accumulate", "5"],
    # The norm of the gradient is larger in every step.
    "clip": ["--lr", "0.5", "--clip-norm", "0.1"],
    "adamw": ["--lr", "0.002", "--optimizer", "adamw", "--weight-decay", "0.01"],
    "mlp": ["--lr", "0.02", "--model", "mlp", "--lr-schedule", "cosine"],
    # What the recipe consists of, without batch normalisation, which depends on the ranks.
    "recipe": ["--recipe", "fast-cpu", "--model", "cnn", "--lr", "0.4", "--tta", "flip_shift"],
}
SIZES = [("ddp", 2), ("fsdp", 3)]
CASES = [(way, *size) for way in WAYS for size in SIZES]
CASES += [("recipe", "pp", 2), ("recipe", "mp", 3)]
CASES += [("sgd", *size) for size in (("ddp", 1), ("fsdp", 1), ("ddp", 3), ("fsdp", 2))]
Truth = Callable[[str], Result]


def assert_same(result: Result, expected: Result, rel: float = 2e-5) -> None:
    """Losses agree to rounding; a sample or two of 101 may fall on the other side."""
    assert set(result.codes) == {0}, result.out
    assert result.losses() == pytest.approx(expected.losses(), rel=rel * ROUNDING)
    assert result.accuracies() == pytest.approx(expected.accuracies(), abs=0.025)


@pytest.fixture(scope="module")
def truth(forge: Start) -> Truth:
    """The run of one process, for each way of training."""

    @functools.cache
    def one(way: str) -> Result:
        result = forge(1, *PLAIN, *WAYS[way], "--strategy", "single")
        assert result.codes == [0], result.out
        return result

    return one


@pytest.mark.parametrize(("way", "strategy", "world"), CASES)
def test_losses_are_those_of_one_process(
    forge: Start, truth: Truth, way: str, strategy: str, world: int
) -> None:
    result = forge(world, *PLAIN, *WAYS[way], "--strategy", strategy)
    assert_same(result, truth(way))
    assert [r["iterations"] for r in result.records("epoch")] == [5, 5]


def test_the_ways_differ(truth: Truth) -> None:
    """Otherwise equal curves would say nothing of clipping or of the optimizer."""
    finals = [round(truth(way).losses()[1], 4) for way in ("sgd", "clip", "adamw", "mlp")]
    assert len(set(finals)) == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_may_be_smaller_than_the_ranks(forge: Start, strategy: str) -> None:
    """Batches of 3 over 4 ranks: one rank has nothing to do in each step, and none hangs."""
    words = [*UNEVEN[:2], "--train-samples", "7", "--test-samples", "3", "--epochs", "2"]
    words += ["--global-batch-size", "3", "--lr", "0.01"]
    one, four = (
        forge(world, *words, "--strategy", kind) for world, kind in ((1, "single"), (4, strategy))
    )
    assert_same(four, one)


def test_a_batch_a_rank_is_the_same_as_its_global_batch(forge: Start) -> None:
    weak = forge(2, *UNEVEN, "--epochs", "1", "--batch-size-per-rank", "32")
    strong = forge(2, *UNEVEN, "--epochs", "1", "--global-batch-size", "64")
    assert weak.losses() == strong.losses()
    start = weak.record("run_start")
    assert (start["global_batch_size"], start["batch_size_per_rank"]) == (64, 32)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near_the_truth(forge: Start, strategy: str, precision: str) -> None:
    words = [
        "--dataset",
        "synthetic",
        "--train-samples",
        "64",
        "--test-samples",
        "20",
        *NO_BREAKDOWN,
    ]
    words += ["--model", "mlp", "--epochs", "1", "--global-batch-size", "32", "--lr", "0.02"]
    full = forge(1, *words, "--strategy", "single")
    low = forge(2, *words, "--precision", precision, "--strategy", strategy)
    assert low.codes == [0, 0], low.out
    assert low.losses() == pytest.approx(full.losses(), rel=0.02)
    assert low.losses() != full.losses()


@pytest.mark.parametrize(
    "words",
    [
        ["--no-channels-last"],
        ["--no-keep-memory"],
        ["--strategy", "ddp", "--ddp-bucket-mib", "0.1", "--no-ddp-gradient-as-bucket-view"],
        ["--strategy", "fsdp", "--no-fsdp-reshard-after-forward"],
        ["--strategy", "fsdp", "--fsdp-wrap-min-parameters", "1000000"],
    ],
    ids=lambda words: words[-1],
)
def test_what_changes_speed_or_memory_changes_no_loss(
    forge: Start, truth: Truth, words: list[str]
) -> None:
    result = forge(2, *PLAIN, *WAYS["sgd"], *words)
    assert_same(result, truth("sgd"), rel=3e-4)  # another memory format sums in another order


NORMALISED = """
from torch import nn

class Mine(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3072, 10), nn.BatchNorm1d(10))

    def forward(self, x):
        if not self.training:
            print("statistics", self[2].running_mean.tolist(), flush=True)
        return super().forward(x).clone()
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_running_statistics_are_the_same_on_every_rank(
    forge: Start, tmp_path: Path, strategy: str
) -> None:
    """Batch normalisation: evaluation is of one model, and the report says what it depends on."""
    (tmp_path / "normalised.py").write_text(NORMALISED)
    words = [*PLAIN, "--epochs", "1", "--eval-batch-size", "101", "--model", "normalised:Mine"]
    done = forge(2, *words, "--strategy", strategy, cwd=str(tmp_path))
    assert done.codes == [0, 0], done.out
    trained = [line for line in done.out.splitlines() if line.startswith("statistics")]
    trained = [line for line in trained if "[0.0, 0.0" not in line]  # the check of the model
    assert len(trained) == 2
    assert trained[0] == trained[1]
    assert "batch normalisation" in done.record("message")["text"]


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp", "mp", "pp"])
def test_the_recipe_trains_under_every_strategy(forge: Start, strategy: str) -> None:
    ranks = 1 if strategy in ("single", "dp") else 2
    batch = "24" if strategy == "pp" else "23"  # in microbatches of one size
    words = [*UNEVEN, "--recipe", "fast-cpu", "--global-batch-size", batch, "--epochs", "3"]
    done = forge(ranks, *words, "--strategy", strategy)
    assert done.codes == [0] * ranks, done.out
    losses = [r["train_loss"] for r in done.records("epoch")]
    assert losses[-1] < 0.9 * losses[0]
    assert "test-time augmentation: --tta flip" in done.out
    assert done.record("run_start")["spec"]["tta"] == "flip"
    # Every weight is there once, and the images' own filters came to every rank.
    assert done.record("run_start")["parameters"] == 127_072


def test_resnet18_trains(forge: Start) -> None:
    words = [
        "--dataset",
        "synthetic",
        "--train-samples",
        "16",
        "--test-samples",
        "8",
        *NO_BREAKDOWN,
    ]
    words += ["--model", "resnet18", "--epochs", "1", "--global-batch-size", "16"]
    done = forge(2, *words, "--strategy", "fsdp")
    assert done.codes == [0, 0], done.out
    assert done.record("run_start")["parameters"] == 11_173_962
