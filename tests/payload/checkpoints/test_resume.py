"""A training that was cut, again and again, and resumed is the one that never was, bit for bit."""

import random
from pathlib import Path

import pytest

from support.cuts import ITERATIONS, RUN, actions, final, measured, newest, same, write_models
from support.rigs import Start

pytestmark = pytest.mark.on_device
# Slow weights every other step, flips that depend on the epoch, and the mean of two predictions.
RECIPE = ("--recipe", "fast-cpu", "--model", "fast_cnn", "--lookahead-every", "2")
CASES = [
    ("single", 1, ()),
    ("single", 1, RECIPE),
    ("ddp", 2, (*RECIPE, "--crop-padding", "2")),
    ("fsdp", 2, ("--lookahead-every", "3", "--bias-lr-factor", "4")),
    ("dp", 1, ("--optimizer", "adamw")),
    ("ddp", 2, ("--precision", "bf16", "--checkpoint-async")),
    ("ddp", 3, ("--ddp-bucket-mib", "0.001")),  # many buckets: their order matters at 3 ranks
    ("ddp", 2, ("--zero1", "--optimizer", "adamw")),
    ("ddp", 2, ("--ddp-comm-hook", "powersgd", "--ddp-powersgd-start", "3", "--threads", "1")),
    ("fsdp", 2, ("--optimizer", "adamw", "--accumulate", "2")),
    ("fsdp", 3, ("--no-fsdp-reshard-after-forward", "--momentum", "0")),
    ("pp", 2, ()),
    ("mp", 2, ()),
]
KILLED, RAISED, STOPPED = -9, 1, 0
CODES = {"kill": KILLED, "raise": RAISED, "usr2": STOPPED, "term": STOPPED}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize(("strategy", "ranks", "words"), CASES)
def test_cut_anywhere_and_resumed_is_never_cut(
    forge: Start, own: Path, strategy: str, ranks: int, words: tuple[str, ...]
) -> None:
    how = [*RUN, "--model", "own_models:noisy", "--strategy", strategy, *words]
    straight = forge(ranks, *how, "--checkpoint-every", "epoch", cwd=str(own))
    assert straight.codes == [0] * ranks, straight.out
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
            run_dir=straight.paths.folder.with_name("cut"), cwd=str(own),
            env={"JOBKIT_FAULT": f"{kind}@{cut}:{struck}:{attempt}"},
        )  # fmt: skip
        assert result.codes[struck] == CODES[kind], result.out
        loaded = [("loaded", saved)] if saved else []
        assert actions(result, attempt)[: len(loaded)] == loaded
        # A thread hears a signal, and what the ranks agree on is read one iteration later.
        at = range(cut, cut + 3) if CODES[kind] == STOPPED else range(cut, cut)
        whole = {i for action, i in actions(result, attempt) if action == "saved"} - {*at}
        due = set(range(every, cut, every)) - set(range(saved + 1))
        # What is written beside the training may be under way still when a rank is killed.
        assert whole <= due if "--checkpoint-async" in words else whole == due
        before, saved = saved, newest(result)
        assert saved in (at or {before, *due})
    last = forge(
        ranks, *how, "--checkpoint-every", str(every), "--attempt", str(times),
        run_dir=result.paths.folder, cwd=str(own),
    )  # fmt: skip
    assert last.codes == [0] * ranks, last.out
    assert not saved or actions(last, times)[0] == ("loaded", saved)
    assert same(final(straight), final(last)) == []
    random_states = [final(last)[f"rank.{rank}.random.cpu"] for rank in range(ranks)]
    assert len({tuple(state.tolist()) for state in random_states}) == ranks  # each its own
    # What was recorded twice is the same twice; together they are the straight run's epochs.
    assert sorted(set(measured(last, times + 1))) == measured(straight)
