"""Checkpoints of real trainings: cut and resumed, here or elsewhere, it is the one never cut."""

import random
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobkit.errors import UsageError
from jobkit.paths import RunPaths
from jobkit.payload.device import seed_rank
from jobkit.payload.resume import _check_fits
from jobkit.spec.runspec import RunSpec
from jobkit.spec.strategies import FACTS
from support import zero1
from support.cuts import (
    DATA,
    ITERATIONS,
    RUN,
    SAMPLES,
    actions,
    final,
    kept,
    measured,
    newest,
    same,
    seen,
    warnings,
)
from support.rigs import Result, Start

NOISY = (*RUN, "--model", "own_models:noisy")
PLAIN = (*RUN, "--model", "own_models:plain", "--lr", "0.1")

# --- cut again and again, at the same ranks: bit for bit ---------------------------------------

# Slow weights every fifth step, flips that depend on the epoch, and the mean of two predictions.
RECIPE = ("--recipe", "fast-cpu", "--model", "fast_cnn")
WORDS = {"ddp": RECIPE, "fsdp": ("--optimizer", "adamw", "--accumulate", "2")}
WORDS["dp"] = ("--optimizer", "adamw")
CASES = [(name, 2 - facts.one_rank, WORDS.get(name, ())) for name, facts in FACTS.items()]
ALSO = [
    ("ddp", 2, ("--precision", "bf16")),
    ("ddp", 3, ("--ddp-bucket-mib", "0.001")),  # many buckets: their order matters at 3 ranks
]
CODES = {"kill": -9, "raise": 1, "usr2": 0, "term": 0}


@pytest.mark.on_device
@pytest.mark.parametrize(
    ("strategy", "ranks", "words"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in ALSO)],
)
def test_cut_anywhere_and_resumed_is_never_cut(forge, own, strategy, ranks, words) -> None:
    how = [*NOISY, "--strategy", strategy, *words]
    straight = forge(ranks, *how, "--checkpoint-every", "epoch", cwd=own)
    draw = random.Random(f"{strategy}{ranks}{words}")
    # The strategies with most state are cut twice, the others once: each start takes a second.
    times = 2 if strategy in ("single", "ddp") else 1
    cuts = sorted(draw.sample(range(2, ITERATIONS - 3), times))
    every = draw.randrange(1, cuts[0])
    saved = 0  # the iteration of the newest checkpoint
    for attempt, cut in enumerate(cuts):
        kind, struck = draw.choice(sorted(CODES)), draw.randrange(ranks)
        cut = max(cut, saved + 1)
        result = forge(
            ranks, *how, "--checkpoint-every", str(every), "--attempt", str(attempt),
            run_dir=straight.paths.folder.with_name("cut"), cwd=own,
            env={"JOBKIT_FAULT": f"{kind}@{cut}:{struck}:{attempt}"}, code=None,
        )  # fmt: skip
        assert result.codes[struck] == CODES[kind], result.out
        loaded = [("loaded", saved)] if saved else []
        assert actions(result, attempt)[: len(loaded)] == loaded
        # A thread hears a signal, and what the ranks agree on is read one iteration later.
        at = range(cut, cut + 3) if CODES[kind] == 0 else range(cut, cut)
        whole = {i for action, i in actions(result, attempt) if action == "saved"} - {*at}
        due = set(range(every, cut, every)) - set(range(saved + 1))
        assert whole == due
        before, saved = saved, newest(result)
        assert saved in (at or {before, *due})
    last = forge(
        ranks, *how, "--checkpoint-every", str(every), "--attempt", str(times),
        run_dir=result.paths.folder, cwd=own,
    )  # fmt: skip
    assert not saved or actions(last, times)[0] == ("loaded", saved)
    assert same(final(straight), final(last)) == []
    random_states = [final(last)[f"rank.{rank}.random.cpu"] for rank in range(ranks)]
    assert len({tuple(state.tolist()) for state in random_states}) == ranks  # each its own
    # What was recorded twice is the same twice; together they are the straight run's epochs.
    assert sorted(set(measured(last, times + 1))) == measured(straight)


def test_an_optimizer_that_is_sharded_is_whole_in_a_checkpoint(forge: Start, own: Path) -> None:
    """Resumed as it was written it is never cut; ddp takes it, and other ranks do."""
    how = (*PLAIN, "--optimizer", "adamw", "--checkpoint-every", "10", "--check-ranks", "5")

    def train(ranks: int, name: str, *words: str, **more: Any) -> Result:
        words = (*how, "--why", "1", "--strategy", name, *words)
        return forge(ranks, *words, main=zero1.__file__, cwd=own, **more)

    straight = train(2, "zero1")
    cut = train(2, "zero1", env={"JOBKIT_FAULT": "kill@11:0"}, code=None)
    resume = ("--resume-from", str(cut.paths.folder))
    assert same(final(straight), final(train(2, "zero1", *resume))) == []
    assert "optim.0.weight.exp_avg" in final(straight)
    # What is for strategies with copies of the model is for it, too.
    assert straight.records("difference") and "there are none" not in straight.out
    for name, ranks in (("ddp", 2), ("zero1", 3)):
        done = train(ranks, name, *resume)
        assert "written by zero1 at 2 ranks" in done.out
        assert done.losses()[-2:] == pytest.approx(straight.losses()[-2:], rel=5e-4)


# --- at other ranks, under another strategy, with other batches --------------------------------

SAVED, POSITION = 8, 32  # the checkpoint is of iteration 8: 32 samples of epoch 1 are used then
SECOND = 1  # the epoch in progress


@pytest.fixture(scope="module")
def straight(forge: Start, own: Path) -> Result:
    """One process that was never cut."""
    return forge(1, *PLAIN, "--strategy", "single", cwd=own)


@pytest.fixture(scope="module")
def cut_at_8(forge: Start, own: Path) -> Callable[[str, int], Result]:
    """A run that was killed in the middle of its second epoch; made once of a kind."""

    @cache
    def make(strategy: str, ranks: int) -> Result:
        fault = {
            "JOBKIT_FAULT": f"kill@{SAVED + 1}:{ranks - 1}",
            "JOBKIT_SEEN": f"cut-{strategy}{ranks}",
        }
        words = (*PLAIN, "--strategy", strategy, "--checkpoint-every", "4")
        done = forge(ranks, *words, cwd=own, env=fault, code=None)
        assert actions(done) == [("saved", 4), ("saved", SAVED)], done.out
        return done

    return make


@pytest.fixture
def cut(cut_at_8: Callable[[str, int], Result]) -> Result:
    return cut_at_8("ddp", 4)


@pytest.mark.parametrize(
    ("written", "ranks", "strategy", "readers"),
    [
        *(("ddp", 4, "ddp", 3), ("ddp", 4, "fsdp", 2), ("ddp", 4, "pp", 2), ("fsdp", 2, "ddp", 3)),
        pytest.param("pp", 2, "single", 1, marks=pytest.mark.long),
    ],
)
def test_written_by_others_at_other_ranks(
    forge: Start, own: Path, cut_at_8: Callable[[str, int], Result], straight: Result,
    written: str, ranks: int, strategy: str, readers: int,
) -> None:  # fmt: skip
    words = ("--strategy", strategy, "--resume-from", str(cut_at_8(written, ranks).paths.folder))
    name = f"{written}-{strategy}{readers}"
    done = forge(readers, *PLAIN, *words, cwd=own, env={"JOBKIT_SEEN": name})
    assert actions(done) == [("loaded", SAVED)]
    assert f"written by {written} at {ranks} ranks" in done.out
    # The epochs from the second on are those of the run that was never cut, but for rounding.
    wanted = [m[:3] for m in measured(straight) if m[0] >= SECOND]
    close = [pytest.approx(m, rel=5e-4) for m in wanted]
    assert [m[:3] for m in measured(done)] == close
    if "pp" not in (strategy, written):  # whose ranks all get the samples of their pipeline
        before = seen(own, f"cut-{written}{ranks}", ranks, SECOND, lambda step: step < SAVED)
        assert sorted(before + seen(own, name, readers, SECOND)) == list(range(SAMPLES))
        assert seen(own, name, readers, SECOND + 1) == list(range(SAMPLES))


def test_other_batches_see_what_is_left_of_the_epoch_once(forge, own, cut) -> None:
    """Weak scaling: 21 samples a step at 3 ranks, after steps of 16 at 4."""
    done = forge(
        3, *DATA, "--epochs", "3", "--model", "own_models:plain", "--batch-size-per-rank", "7",
        "--resume-from", str(cut.paths.folder), "--checkpoint-every", "epoch",
        cwd=own, env={"JOBKIT_SEEN": "weak"},
    )  # fmt: skip
    for rank in range(3):  # the model draws nothing: the state is the one that it resumed with
        with torch.random.fork_rng([]):
            seed_rank(0, rank, iteration=SAVED)
            begun = torch.get_rng_state()
        assert torch.equal(final(done)[f"rank.{rank}.random.cpu"], begun)
    before = seen(own, "cut-ddp4", 4, SECOND, lambda step: step < SAVED)
    assert sorted(before + seen(own, "weak", 3, SECOND)) == list(range(SAMPLES))
    assert seen(own, "weak", 3, SECOND + 1) == list(range(SAMPLES))
    (epoch, *_) = done.records("epoch")
    assert (epoch["epoch"], epoch["begun_at"]) == (SECOND, POSITION)


@pytest.mark.parametrize(
    ("name", "value", "position", "refused"),
    [
        *(("model", "cnn", 0, True), ("width", 2, 0, True), ("optimizer", "adamw", 0, True)),
        *(("hidden", 64, 0, True), ("speed_run", True, 0, True), ("lr", 0.3, 8, False)),
        # In the middle of an epoch, of the same samples in the same order too.
        *(("train_samples", 80, 8, True), ("train_samples", 80, 0, False), ("seed", 3, 8, True)),
        *(("train_split", 0.8, 8, True), ("seed", 3, 0, False), ("repeat", 1, 8, True)),
    ],
)
def test_of_another_training_is_refused(name, value, position, refused) -> None:
    spec = RunSpec(model="mlp")
    checkpoint: Any = SimpleNamespace(spec=spec.to_dict(), folder=Path("it"), shapes={})
    checkpoint.progress = SimpleNamespace(position=position)
    here: Any = SimpleNamespace(strategy=SimpleNamespace(parameter_count=0, named_parameters=dict))
    here.spec = RunSpec(**{"model": "mlp", name: value})
    line = f"{name} is {spec.to_dict()[name]!r} there and {value!r} here"
    with pytest.raises(UsageError, match=line) if refused else nullcontext():
        _check_fits(checkpoint, here, None)


@pytest.mark.parametrize(
    ("name", "shape", "count", "fits"),
    [("a", 6, 6, 1), ("b", 6, 6, 0), ("a", (2, 3), 6, 0), ("a", 6, 5, 0)],
)
def test_parameters_of_other_number_names_or_shapes_are_refused(name, shape, count, fits) -> None:
    strategy = SimpleNamespace(parameter_count=count)
    strategy.named_parameters = lambda: {name: torch.zeros(shape)}
    saved: Any = SimpleNamespace(spec={}, folder="it", progress=SimpleNamespace(position=0))
    saved.shapes = {"model.a": (torch.Size([6]), torch.float32)}
    here: Any = SimpleNamespace(spec=RunSpec(), strategy=strategy)
    line = f"has 6 parameters, and this one {count}, of other names or shapes"
    with nullcontext() if fits else pytest.raises(UsageError, match=line):
        _check_fits(saved, here, None)


def test_nothing_left_to_train_is_said(forge: Start, own: Path, straight: Result) -> None:
    done = forge(1, *PLAIN, "--strategy", "single", "--checkpoint-every", "epoch", cwd=own)
    how = (*PLAIN, "--strategy", "single", "--resume-from")
    again = forge(1, *how, str(done.paths.folder), cwd=own)
    assert "training is already complete" in warnings(again)
    assert again.record("run_end")["val_loss"] == straight.record("run_end")["val_loss"]
    none = forge(2, *PLAIN, "--resume-from", str(own), cwd=own, code=2)
    assert f"--resume-from {own}: no checkpoint there; name a run's folder" in none.out


# --- broken ones are skipped -------------------------------------------------------------------

FILE = "__0_0.distcp"
ADAMW = (*NOISY, "--strategy", "single", "--optimizer", "adamw")


@pytest.fixture(scope="module")
def adamw(forge: Start, own: Path) -> tuple[Result, Result]:
    """A run that was never cut, and the same one killed after its checkpoints of 4 and 8."""
    whole = forge(1, *ADAMW, "--checkpoint-every", "epoch", cwd=own)
    fault = {"JOBKIT_FAULT": "kill@9"}
    return whole, forge(1, *ADAMW, "--checkpoint-every", "4", cwd=own, env=fault, code=-9)


@pytest.mark.parametrize(
    ("broken", "change", "named", "loaded"),
    [
        ([8], "cut", False, 4),
        ([8], "garbage", False, 4),  # seen when it is loaded over the model
        ([8, 4], "cut", False, 0),
        # The user named them, or the model is half of a checkpoint's by now.
        ([8, 4], "cut", True, None),
        ([8, 4], "garbage", False, None),
    ],
)
def test_a_broken_one_is_skipped(
    forge: Start, own: Path, adamw: tuple[Result, Result], tmp_path: Path,
    broken: list[int], change: str, named: bool, loaded: int | None,
) -> None:  # fmt: skip
    """Files that are cut short, or are garbage of the same size."""
    straight, paths = adamw[0], RunPaths(tmp_path / "run")
    shutil.copytree(adamw[1].paths.folder, paths.folder)
    for iteration in broken:
        path = paths.checkpoints / f"{iteration:08d}-0" / FILE
        content = path.read_bytes()
        path.write_bytes(content[:-100] if change == "cut" else b"x" * len(content))
    how = (*ADAMW, "--checkpoint-every", "epoch", "--attempt", "1")
    code = 2 if loaded is None else 0
    if named:
        done = forge(1, *how, "--resume-from", str(paths.folder), cwd=own, code=code)
    else:
        done = forge(1, *how, run_dir=paths.folder, cwd=own, code=code)
    if loaded is None:
        how = "leave out --resume-from" if named else "remove that folder"
        assert f"in {paths.checkpoints}: to begin from scratch, {how}\n" in done.out
        return
    expected = [("rejected", iteration) for iteration in broken]
    expected += [("loaded", loaded)] * bool(loaded)
    assert actions(done, 1)[: len(expected)] == expected
    assert "checkpoint 00000008-0 is corrupt, skipped: " in warnings(done, 1)
    assert ("no valid checkpoint: the run starts from scratch" in warnings(done, 1)) == (not loaded)
    assert same(final(straight), final(done)) == []


def test_a_fault_that_one_rank_sees_is_told_to_all(forge: Start, own: Path) -> None:
    how = (*NOISY, "--strategy", "fsdp", "--checkpoint-every", "3", "--checkpoint-checksums")
    cut = forge(2, *how, cwd=own, env={"JOBKIT_FAULT": "raise@7:1"}, code=None)
    assert actions(cut) == [("saved", 3), ("saved", 6)]
    flip = cut.paths.checkpoints / "00000006-0" / "__1_0.distcp"
    flip.write_bytes(flip.read_bytes()[::-1])
    (unfinished := cut.paths.checkpoints / ".00000007-0.tmp").mkdir()
    (unfinished / FILE).write_bytes(b"half of it")
    done = forge(2, *how, "--attempt", "1", run_dir=cut.paths.folder, cwd=own)
    assert not unfinished.exists()  # what an attempt could not finish is removed
    assert actions(done, 1)[:2] == [("rejected", 6), ("loaded", 3)]
    assert "__1_0.distcp has another checksum" in warnings(done, 1)


# --- when they are written, and by whom --------------------------------------------------------

# As a full disk: of the second checkpoint on, what rank 1 writes is cut short.
FULL = """
import os, resource
from jobkit.payload.checkpoint import Checkpoints
from own_models import noisy

save = Checkpoints.save

def saving(self, trainer):
    saved = save(self, trainer)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    return saved

Checkpoints.save = saving
"""


def test_a_full_disk_is_told_and_training_goes_on(forge: Start, own: Path) -> None:
    (own / "full.py").write_text(FULL)
    often = ("--checkpoint-every", "4", "--model", "full:noisy", "--strategy", "fsdp")
    done = forge(2, *RUN, *often, cwd=own)
    assert done.record("run_end")["status"] == "ok" and "Traceback" not in done.out
    assert kept(done) == ["00000004-0"]
    text = warnings(done)
    assert f"the checkpoint of iteration {ITERATIONS} could not be written (rank 1: " in text
    # The system's words, or torch's where it is not the last write that fails.
    assert re.search("File too large|is the disk full, or a quota", text), text
    assert "the last is of 4" in text


def test_by_time_and_no_more_than_are_kept(forge: Start, own: Path) -> None:
    timed = ("--checkpoint-every", "0.1s", "--checkpoint-keep", "3")
    done = forge(2, *NOISY, *timed, cwd=own)
    saved = [iteration for _, iteration in actions(done)]
    assert saved == sorted(set(saved)) and saved[-1] == ITERATIONS
    assert kept(done) == [f"{iteration:08d}-0" for iteration in saved[-3:]]


def test_an_attempt_that_is_not_the_newest_ends(forge: Start, own: Path, tmp_path: Path) -> None:
    """The job was requeued while its first start went on, on a node that Slurm had lost."""
    paths = RunPaths(tmp_path / "run")
    (paths.attempts / "1").mkdir(parents=True)
    often = ("--checkpoint-every", "4", "--attempt", "0")
    done = forge(2, *NOISY, *often, run_dir=paths.folder, cwd=own, code=None)
    assert None not in done.codes and 0 not in done.codes
    assert "attempt 0 is fenced: attempt 1 of this run has begun" in str(done.outcome)
    assert not list(paths.checkpoints.glob("*"))
