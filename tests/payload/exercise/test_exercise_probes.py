"""The probes of the exercises: what they measure is what the chapters say."""

import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

import jobkit.__main__
from jobkit.errors import Exit, UsageError
from jobkit.exercise import cli
from jobkit.exercise.catalogue import EXERCISES
from jobkit.exercise.probes import (
    ending,
    joining,
    loading,
    messages,
    replicas,
    rounding,
    runs,
    shapes,
    sharding,
    training,
)
from jobkit.exercise.ranks import RankError, on_ranks
from jobkit.exercise.table import Table
from jobkit.launch.cli import make_plan, parser
from support.fake_study import whole_run
from support.place import ROOT

pytestmark = pytest.mark.usefixtures("fork_server")


def _fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RankError, match="rank 1: ValueError: of rank 1"):
        on_ranks(_fails)


def test_every_exercise_has_its_probes_page_and_skeleton() -> None:
    for each in EXERCISES.values():
        page = (ROOT / "docs" / "exercises" / f"{each.page}.md").read_text()
        assert f"## {each.number} " in page and f"jobkit exercise {each.number}\n" in page
        assert each.skeleton.exists() == bool(each.check)
        for name in each.probes:
            module, _, function = name.partition(":")
            source = ROOT / "src" / "jobkit" / "exercise" / "probes" / f"{module}.py"
            assert f"def {function}() -> list[Table]:" in source.read_text()


# What a chapter says of each probe's table.
SAYS: list[tuple[Callable[[], list[Table]], Callable[[Any, Any], bool]]] = [
    (shapes.batches, lambda t, c: c("batches") == c("shape[1:] == (3, 32, 32)") == [16, 16, 16]
        and [row[4] for row in t.rows] == [15, 0, 0]),
    (joining.places, lambda t, c: len(set(c("process"))) == 2 and c("sum") == [3, 3]
        and c("own value") == [1, 2]),
    (joining.incomplete, lambda t, c: "imeout" in c("init_process_group")[2]
        and c("init_process_group")[:2] == ["joined", "joined"]
        and c("init_process_group")[3] == "does not come" and c("took (s)")[2] >= joining._WAIT_S),
    (loading.shares, lambda t, c: c("also seen by the other") == [16, 16, 0, 0]
        and c("samples") == [16, 16, 8, 8]),
    (loading.orders, lambda t, c: c("seen before") == [False, True, True, False, False, False]),
    (loading.files, lambda t, c: c("bytes found")[2:] == [1_000_000] * 2
        and c("bytes in the end")[2:] == [1_000_000] * 2
        and c("bytes found")[0] == c("bytes in the end")[0]),
    (loading.uneven, lambda t, c: c("counted") == [4, 6, 5]
        and c("accuracy (%)") == approx([75, 100 * 4 / 6, 60])),
    (replicas.gradients, lambda t, c: c("gradient") == [4, 8, 6, 6]
        and [len(set(c("weight after a step")[i : i + 2])) for i in (0, 2)] == [2, 1]),
    (replicas.held, lambda t, c: len(set(c("parameters (MiB)"))) == 1 and len(t.rows) == 6),
    (sharding.forward, lambda t, c: {row[0]: [float(x) for x in row[2:]] for row in t.rows} == {
        "DDP": approx([8, 8, 8, 16], abs=0.2), "SHARD_GRAD_OP": approx([4, 13, 12, 8], abs=0.2),
        "FULL_SHARD": approx([4, 5, 4, 8], abs=0.2)}),
    (sharding.groups, lambda t, c: c("all-gathers") == [2, 4, 8, 16]
        and c("reduce-scatters") == [1, 2, 4, 8]
        and c("in forward (MiB)") == sorted(c("in forward (MiB)"), reverse=True)
        and c("in forward (MiB)")[0] > 2 * c("in forward (MiB)")[-1]),
    (messages.per_step, lambda t, c: c("collectives")[1:3] == [3, 24] and min(c("best (ms)")) > 0
        and c("held after it (MiB)")[3] > 1.5 * c("held after it (MiB)")[4]),
    (rounding.bytes_and_time, lambda t, c: c("parameters (MiB)")[1] * 2 == c("parameters (MiB)")[0]
        and min(c("time (ms)")) > 0),
    (rounding.sums, lambda t, c: c("1 + 1,000 times 0.001") == approx([2, 1, 1], abs=1e-4)
        and c("4,096 times 0.01")[1] < 10
        and c("4,096 times 0.01")[0] == approx(c("4,096 times 0.01")[2], rel=0.01)),
    (ending.devices, lambda t, c: [(row[0], row[2]) for row in t.rows if "IndexError" in row[-1]]
        == [("rank", 1)]),
    (ending.left_over, lambda t, c: min(c("sockets")[1:3]) > c("sockets")[0]
        and c("sockets")[5] < c("sockets")[4] and c("threads")[2] > c("threads")[0]),
    (ending.alone, lambda t, c: "imed out" in c("what it says")[0]
        and "Rank 1 failed to pass" in c("what it says")[2]
        and min(c("waited (s)")[0], c("waited (s)")[2]) >= ending._WAIT_S * 0.9),
    (training.gradients,
        lambda t, c: c("norm without")[-1] > 2 * c("norm with zero_grad")[-1]),
    (training.memory, lambda t, c: c("kept for backward (MiB)")[0] == 0
        and c("kept for backward (MiB)")[1] > 50),
    (training.modes, lambda t, c: c("two passes differ by")[0] > 0 == c("two passes differ by")[1]
        and c("running mean moves by")[0] > 0 == c("running mean moves by")[1]),
    (training.means, lambda t, c: c(t.head[2])[0] != c(t.head[2])[1]
        and c(t.head[4]) == approx(c(t.head[5])) and abs(c(t.head[3])[0] - c(t.head[5])[0]) > 0.01),
]  # fmt: skip


@pytest.mark.parametrize(("probe", "right"), SAYS, ids=lambda x: x.__name__)
def test_a_probe_measures_what_its_chapter_says(probe: Any, right: Any) -> None:
    (table,) = probe()
    assert right(table, table.column), table.text()


def _made_up(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Runs of the study that the words describe are made up; other commands are called here."""
    if words[0] != "run":
        assert jobkit.__main__.main(list(words)) == Exit.OK
        return
    plan = make_plan(parser().parse_args([*words[1:]], Namespace(command=())))
    plan.save()
    for run_id in plan.runs:
        whole_run(plan, run_id)


def test_a_study_its_plots_and_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a study whose runs are made up; those of real runs are the notebook's and 6.2's."""
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path))
    monkeypatch.setattr(runs, "_call", _made_up)
    with pytest.raises(UsageError, match=r"exercise 7\.1"):
        runs.sentences()
    (study,) = runs.study()
    assert sorted(study.column("ranks")) == [1, 1, 2, 2]
    ranks_and_speed_ups = zip(study.column("ranks"), study.column("speed-up"), strict=True)
    assert all(s == pytest.approx({1: 1, 2: 1.9}[n]) for n, s in ranks_and_speed_ups)
    assert None not in study.column("s per epoch")
    said, figures = runs.sentences()
    assert len(said.rows) >= 2 and len(figures.rows) >= 3


def test_the_command_lists_writes_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([]) == Exit.OK
    listed = capsys.readouterr().out
    assert all(f"  {number}  " in listed for number in EXERCISES)
    mine = str(tmp_path / "mine.py")
    assert cli.main(["5.1", "--skeleton", mine]) == Exit.OK
    assert cli.main(["5.1", "--check", mine]) == Exit.THRESHOLD
    assert "WRONG main() is not completed" in capsys.readouterr().out
    for words in (["5.1", "--skeleton", mine], ["1.1", "--check", mine], ["9"], ["--check", mine],
                  ["5.1", "--check", str(tmp_path / "none.py")]):  # fmt: skip
        assert cli.main(words) == Exit.USAGE
        assert len(capsys.readouterr().err.splitlines()) == 1
