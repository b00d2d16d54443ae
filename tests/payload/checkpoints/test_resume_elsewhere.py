"""A checkpoint read at another number of ranks, under another strategy, with other batches."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobkit.checks.verify.cases import EXACT
from jobkit.errors import UsageError
from jobkit.payload import random_numbers
from jobkit.payload.checkpoints.resume import _check_fits
from jobkit.payload.data.batches import Batches
from jobkit.spec.runspec import RunSpec
from support.cuts import (
    DATA,
    RUN,
    SAMPLES,
    actions,
    final,
    measured,
    seen,
    warnings,
    write_models,
)
from support.rigs import Result, Start

HOW = (*RUN, "--model", "own_models:plain", "--lr", "0.1")
SAVED, POSITION = 8, 32  # the checkpoint is of iteration 8: 32 samples of epoch 1 are used then
FIRST_KILLED = SAVED + 1
SECOND = 1  # the epoch in progress


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def straight(forge: Start, own: Path) -> Result:
    """One process that was never cut."""
    return forge(1, *HOW, "--strategy", "single", cwd=str(own))


def cut_at_8(forge: Start, own: Path, ranks: int, *words: str) -> Result:
    """A run that was killed in the middle of its second epoch."""
    rank = random.Random(str(words)).randrange(ranks)
    done = forge(
        ranks, *HOW, *words, "--checkpoint-every", "4", cwd=str(own),
        env={"JOBKIT_FAULT": f"kill@{FIRST_KILLED}:{rank}", "JOBKIT_SEEN": f"cut{ranks}"},
    )  # fmt: skip
    assert actions(done) == [("saved", 4), ("saved", SAVED)], done.out
    return done


@pytest.fixture(scope="module")
def cut(forge: Start, own: Path) -> Result:
    return cut_at_8(forge, own, 4, "--strategy", "ddp")


def used_before(own: Path, cut_ranks: int) -> list[int]:
    """The samples of the second epoch that the checkpoint has behind it."""
    return seen(own, f"cut{cut_ranks}", cut_ranks, SECOND, lambda step: step < SAVED)


def near(result: Result, straight: Result) -> None:
    """The epochs from the second on are those of the run that was never cut, but for rounding."""
    wanted = [m for m in measured(straight) if m[0] >= SECOND]
    found = measured(result)
    assert [m[0] for m in found] == [m[0] for m in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one[1:3] == pytest.approx(other[1:3], rel=EXACT["float32"])


@pytest.mark.parametrize(
    ("ranks", "strategy", "words"),
    [
        (1, "ddp", ()),
        (2, "ddp", ("--zero1",)),
        (3, "ddp", ()),
        (8, "ddp", ()),
        (2, "fsdp", ()),
        (1, "single", ()),
        (2, "pp", ()),
    ],
)
def test_written_by_ddp_at_4_ranks(
    forge: Start, own: Path, cut: Result, straight: Result, ranks: int, strategy: str,
    words: tuple[str, ...],
) -> None:  # fmt: skip
    name = f"{strategy}{ranks}"
    done = forge(
        ranks, *HOW, "--strategy", strategy, *words, "--resume-from", str(cut.paths.folder),
        cwd=str(own), env={"JOBKIT_SEEN": name},
    )  # fmt: skip
    assert done.codes == [0] * ranks, done.out
    assert actions(done) == [("loaded", SAVED)]
    near(done, straight)
    if strategy != "pp":  # whose ranks all get the samples of their pipeline
        after = seen(own, name, ranks, SECOND)
        assert sorted(used_before(own, 4) + after) == list(range(SAMPLES))
        assert seen(own, name, ranks, SECOND + 1) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("written", "ranks", "read", "readers"),
    [("fsdp", 2, "ddp", 3), ("pp", 2, "single", 1), ("mp", 2, "fsdp", 2)],
)
def test_written_by_another_strategy(
    forge: Start, own: Path, straight: Result, written: str, ranks: int, read: str, readers: int
) -> None:
    before = cut_at_8(forge, own, ranks, "--strategy", written)
    done = forge(
        readers, *HOW, "--strategy", read, "--resume-from", str(before.paths.folder),
        cwd=str(own),
    )  # fmt: skip
    assert done.codes == [0] * readers, done.out
    assert f"written by {written} at {ranks} ranks" in done.out
    near(done, straight)


def test_other_batches_see_what_is_left_of_the_epoch_once(
    forge: Start, own: Path, cut: Result
) -> None:
    """Weak scaling: 21 samples a step at 3 ranks, after steps of 16 at 4."""
    done = forge(
        3, *DATA, "--epochs", "3", "--model", "own_models:plain", "--batch-size-per-rank", "7",
        "--resume-from", str(cut.paths.folder), "--checkpoint-every", "epoch",
        cwd=str(own), env={"JOBKIT_SEEN": "weak"},
    )  # fmt: skip
    assert done.codes == [0] * 3, done.out
    for rank in range(3):  # the model draws nothing: the state is the one that it resumed with
        with torch.random.fork_rng([]):
            random_numbers.begin(0, rank, iteration=SAVED)
            begun = torch.get_rng_state()
        assert torch.equal(final(done)[f"rank.{rank}.random.cpu"], begun)
    batches = Batches(SAMPLES, 16, 0, 1, 1, seed=0).epoch(SECOND)
    first = [i for _ in range(2) for i in next(batches).micro_batches[0].tolist()]
    assert used_before(own, 4) == sorted(first)
    assert sorted(first + seen(own, "weak", 3, SECOND)) == list(range(SAMPLES))
    assert seen(own, "weak", 3, SECOND + 1) == list(range(SAMPLES))
    (epoch, *_) = done.records("epoch")
    assert (epoch["epoch"], epoch["begun_at"]) == (SECOND, POSITION)


@pytest.mark.parametrize(
    ("words", "width", "why"),
    [
        (("--model", "cnn"), 12, "model is 'own_models:plain' there and 'cnn' here"),
        (("--width", "2"), 12, "width is 1 there and 2 here"),
        (("--optimizer", "adamw"), 12, "optimizer is 'sgd' there and 'adamw' here"),
        (("--train-samples", "80"), 12, "train_samples is 90 there and 80 here"),
        (("--seed", "3"), 12, "seed is 0 there and 3 here"),
        ((), 14, "parameter 5.bias is of shape (12,) there and of shape (14,) here"),
    ],
)
def test_of_another_training_is_refused(
    forge: Start, own: Path, cut: Result, words: tuple[str, ...], width: int, why: str
) -> None:
    done = forge(
        1, *HOW, *words, "--resume-from", str(cut.paths.folder), cwd=str(own),
        env={"OWN_WIDTH": str(width)},
    )  # fmt: skip
    assert done.codes == [2]
    (line,) = [text for text in done.out.splitlines() if "jobkit: error" in text]
    assert line.endswith(f"00000008-0 belongs to a different configuration: {why}")
    assert "Traceback" not in done.out


@pytest.mark.parametrize(
    ("name", "value", "position"), [("hidden", 64, 0), ("hidden", 64, 8), ("train_split", 0.8, 8)]
)
def test_of_other_layers_or_samples_is_refused(name: str, value: Any, position: int) -> None:
    progress = SimpleNamespace(position=position)
    manifest: Any = SimpleNamespace(spec=RunSpec(model="mlp").to_dict(), progress=progress)
    with pytest.raises(UsageError, match=f"{name} is None there and {value} here"):
        _check_fits(manifest, RunSpec(**{"model": "mlp", name: value}), Path("it"))


def test_no_checkpoint_where_the_user_says(forge: Start, own: Path, tmp_path: Path) -> None:
    done = forge(2, *HOW, "--resume-from", str(tmp_path), cwd=str(own))
    assert done.codes == [2, 2]
    assert f"--resume-from {tmp_path}: no checkpoint there; name a run's folder" in done.out


def test_nothing_left_to_train_is_said(forge: Start, own: Path, straight: Result) -> None:
    done = forge(1, *HOW, "--strategy", "single", "--checkpoint-every", "epoch", cwd=str(own))
    again = forge(
        1, *HOW, "--strategy", "single", "--resume-from", str(done.paths.folder), cwd=str(own)
    )
    assert again.codes == [0], again.out
    assert "training is already complete" in warnings(again)
    assert again.record("run_end")["val_loss"] == straight.record("run_end")["val_loss"]
