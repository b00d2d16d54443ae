"""Trainings by the command itself: any number of ranks makes the steps of one process.

`verify` compares gradients and parameters of every strategy (checks/test_verify.py); here are the
losses that a user sees, and what lies beyond one step: samples, schedules, --max-steps.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from jobkit.analysis.collect.records import read_run
from jobkit.analysis.collect.rows import observed_of
from jobkit.payload.strategies.stages import cut
from jobkit.planner.memory import main as memory_main
from support.cuts import DATA, PER_EPOCH, SAMPLES, actions
from support.records import records_of
from support.rigs import NO_BREAKDOWN, ROOT, Result, Start

LONG = pytest.mark.long
# A GPU's library chooses another kernel, with another order of sums, for another batch size.
ROUNDING = 10 if os.environ.get("JOBKIT_TEST_DEVICE") == "cuda" else 1
# 100 samples in batches of 23: neither 2 nor 3 ranks divide them, and the last has 8.
UNEVEN = ["--dataset", "synthetic", "--train-samples", "100", "--test-samples", "101"]
UNEVEN += NO_BREAKDOWN
PLAIN = [*UNEVEN, "--epochs", "2", "--global-batch-size", "23", "--eval-batch-size", "17"]
TINY = ["--dataset", "synthetic", "--train-samples", "64", "--test-samples", "20", *NO_BREAKDOWN]
TINY += ["--model", "mlp", "--epochs", "1", "--global-batch-size", "32", "--lr", "0.02"]
# Batches of 23 are microbatches of 1 or 2 samples at 3 ranks, and none in the last batch; the norm
# of the gradient is larger in every step. The recipe is without batch normalisation, which depends
# on the ranks.
MANY = ["--accumulate", "5", "--lr", "0.5", "--clip-norm", "0.1"]
ADAMW = ["--lr", "0.002", "--optimizer", "adamw", "--weight-decay", "0.01"]
RECIPE = ["--recipe", "fast-cpu", "--model", "cnn", "--lr", "0.4"]


def assert_same(result: Result, expected: Result, rel: float = 2e-5) -> None:
    """Losses agree to rounding; a sample or two of 101 may fall on the other side."""
    assert result.losses() == pytest.approx(expected.losses(), rel=rel * ROUNDING)
    found, wanted = ([r["val_accuracy"] for r in x.records("epoch")] for x in (result, expected))
    assert found == pytest.approx(wanted, abs=0.025)


@pytest.mark.on_device
@pytest.mark.parametrize(
    ("way", "strategy", "world"),
    [(MANY, "ddp", 3), (ADAMW, "fsdp", 2), (RECIPE, "pp", 2)],
)
def test_losses_are_those_of_one_process(forge, way, strategy, world) -> None:
    alone = forge(1, *PLAIN, *way, "--strategy", "single")
    result = forge(world, *PLAIN, *way, "--strategy", strategy)
    assert_same(result, alone)
    assert [r["iterations"] for r in result.records("epoch")] == [5, 5]
    said = "validation is with test-time augmentation: --speed-run" in result.out
    assert said == (way == RECIPE)


def test_the_mean_of_a_batch_is_over_its_own_samples(forge: Start) -> None:
    """All 8 samples are one step, whether the global batch has room for them alone or for more."""
    words = [*UNEVEN, "--train-samples", "8", "--epochs", "2", "--lr", "0.1"]
    full, smaller = (
        forge(1, *words, "--strategy", "single", "--global-batch-size", size)
        for size in ("8", "11")
    )
    assert_same(smaller, full)


@pytest.mark.on_device
def test_a_step_may_be_smaller_than_the_ranks(forge: Start) -> None:
    """Batches of 3 over 4 ranks: one rank has nothing to do in each step, and none hangs."""
    words = [*UNEVEN, "--train-samples", "7", "--test-samples", "3", "--epochs", "2"]
    words += ["--global-batch-size", "3", "--lr", "0.01"]
    one, four = forge(1, *words, "--strategy", "single"), forge(4, *words, "--strategy", "fsdp")
    assert_same(four, one)


@pytest.mark.parametrize(("precision", "strategy"), [("bf16", "ddp"), ("fp16", "fsdp")])
def test_low_precision_stays_near_the_truth(forge: Start, strategy: str, precision: str) -> None:
    full = forge(1, *TINY, "--strategy", "single")
    low = forge(2, *TINY, "--precision", precision, "--strategy", strategy)
    assert low.losses() == pytest.approx(full.losses(), rel=0.02)
    assert low.losses() != full.losses()


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


def test_running_statistics_are_the_same_on_every_rank(forge: Start, tmp_path: Path) -> None:
    """Batch normalisation: evaluation is of one model, and the report says what it depends on."""
    (tmp_path / "normalised.py").write_text(NORMALISED)
    words = [*PLAIN, "--epochs", "1", "--eval-batch-size", "101", "--model", "normalised:Mine"]
    done = forge(2, *words, "--strategy", "fsdp", cwd=tmp_path)
    trained = [line for line in done.out.splitlines() if line.startswith("statistics")]
    first, second = (line for line in trained if "[0.0, 0.0" not in line)  # the check's are
    assert first == second
    assert "batch normalisation" in done.record("message")["text"]


@LONG
@pytest.mark.needs("g++")  # torch.compile on the CPU
def test_compiling_changes_no_loss_and_its_time_is_recorded(forge: Start) -> None:
    words = [*TINY, "--test-samples", "32", "--eval-batch-size", "32", "--strategy", "single"]
    plain = forge(1, *words)
    compiled = forge(1, *words, "--compile", timeout_s=800)
    assert compiled.losses() == pytest.approx(plain.losses(), rel=1e-3)
    startup = compiled.record("startup")
    # It is the first iteration, which is not in the epoch's time.
    assert startup["compile_s"] > compiled.record("epoch")["epoch_time_s"]
    assert startup["total_s"] > startup["compile_s"]
    assert startup["first_step_s"] is None
    assert plain.record("startup")["compile_s"] is None


# --- the model of docs/own-model.md ------------------------------------------------------------

PAGE = (ROOT / "docs" / "own-model.md").read_text()


def test_the_own_model_of_the_page_runs_as_it_says(forge, tmp_path, monkeypatch, capsys) -> None:
    (place,) = re.findall(r"Save this as `~/([\w/.]+)`", PAGE)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (lines,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    model = tmp_path / place
    model.parent.mkdir(parents=True)
    model.write_text(code)
    (memory,) = [line for line in lines.splitlines() if "jobkit memory" in line]
    monkeypatch.syspath_prepend(model.parent)
    assert memory_main(shlex.split(memory.partition("jobkit memory")[2])) == 0
    assert "patches:PatchTransformer: 207,946 parameters" in capsys.readouterr().out
    runs = []
    for words in re.findall("^bash run.sh --nproc-per-node 2 (.*)", lines, re.MULTILINE):
        runs.append(forge(2, *words.split(), cwd=model.parent))
    strategies = [run.record("run_start")["spec"].get("strategy", "ddp") for run in runs]
    assert strategies == ["ddp", "fsdp", "pp"]
    ddp, *others = ([r["train_loss"] for r in run.records("epoch")] for run in runs)
    assert all(losses == pytest.approx(ddp, rel=1e-3) for losses in others)
    assert ddp[1] < ddp[0]
    _, fsdp, pp = (run.out for run in runs)
    assert "fsdp: 5 shard groups" in fsdp  # by class
    assert "pp: 2 stages on 2 ranks" in pp
    _, second = cut(sys.modules["patches"].PatchTransformer(10), 2)
    assert next(name for name, _ in second.named_parameters()).startswith("blocks_2.")


# --- --max-steps -------------------------------------------------------------------------------

STEPS = PER_EPOCH + 3
PART = 3 * 16  # samples of the second epoch
HOW = [*DATA, "--epochs", "4", "--global-batch-size", "16", *NO_BREAKDOWN]
HOW += ["--model", "own_models:noisy", "--checkpoint-every", "4", "--max-steps"]


@pytest.fixture(scope="module")
def short(forge: Start, own: Path) -> Result:
    return forge(2, *HOW, str(STEPS), cwd=own)


def windows(result: Result, rank: int) -> list[dict[str, Any]]:
    name = f"0.r{rank}.jsonl" if rank else "0.jsonl"
    return records_of(result.paths.metrics_folder / name, "window")


def test_a_run_ends_as_ok_after_its_steps(short: Result) -> None:
    assert short.outcome is not None and short.outcome["status"] == "ok"
    epochs = short.records("epoch")
    assert [(e["epoch"], e["iterations"]) for e in epochs] == [(0, PER_EPOCH), (1, 3)]
    # The warm-up of the process is not timed; all steps of the second epoch are.
    assert epochs[1]["timed_images"] == PART
    assert actions(short)[-1] == ("saved", STEPS)
    # The schedule ends with the steps: a quarter of them rises to the peak, the others fall.
    assert epochs[1]["lr"] == pytest.approx(0.05 / (0.75 * STEPS))


def test_the_windows_have_each_step_of_each_rank_once(short: Result) -> None:
    for rank in (0, 1):
        found = windows(short, rank)
        assert sum(w["steps"] for w in found) == STEPS == found[-1]["step"]
        assert {w["epoch"] for w in found} == {0, 1}
        assert [w["warmup"] for w in found] == sorted((w["warmup"] for w in found), reverse=True)
        assert all(w["wall_s"] >= w["step_p50_s"] > 0 for w in found)
    work = sum(w["work"] for rank in (0, 1) for w in windows(short, rank))
    assert work == SAMPLES + PART
    records = read_run(short.paths, None)
    observed = observed_of(short.paths.log, short.paths.folder, records, None, None, None)
    assert observed and (observed.unit, observed.source) == ("images", "meter")
    assert records.lost == 0


def test_resumed_with_more_steps_it_goes_on_in_the_midst_of_the_epoch(forge, own, short) -> None:
    more = [*HOW, str(2 * PER_EPOCH), "--resume-from", str(short.paths.folder)]
    longer = forge(2, *more, cwd=own)
    assert actions(longer)[0] == ("loaded", STEPS)
    (epoch,) = longer.records("epoch")
    assert (epoch["epoch"], epoch["begun_at"]) == (1, PART)
    assert epoch["iterations"] == 2 * PER_EPOCH - STEPS
    # The windows of an epoch that is continued know of waits too.
    assert all(w["data_wait_s"] is not None for rank in (0, 1) for w in windows(longer, rank))
