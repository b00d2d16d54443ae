"""The probes of the exercises: what they measure is what the chapters say."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

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


def test_a_fixed_batch_size_fails_at_the_last_batch() -> None:
    (table,) = shapes.batches()
    assert table.column("batches") == table.column("shape[1:] == (3, 32, 32)") == [16, 16, 16]
    assert [row[4] for row in table.rows] == [15, 0, 0]


def test_ranks_are_processes_that_add_up() -> None:
    (table,) = joining.places()
    assert len(set(table.column("process"))) == 2
    assert table.column("own value") == [1, 2] and table.column("sum") == [3, 3]


def test_a_group_that_is_not_complete_waits() -> None:
    (table,) = joining.incomplete()
    said, took = table.column("init_process_group"), table.column("took (s)")
    assert said[:2] == ["joined", "joined"] and said[3] == "does not come"
    assert "imeout" in said[2] and took[2] >= joining._WAIT_S


def test_without_a_sampler_both_ranks_see_all() -> None:
    (table,) = loading.shares()
    assert table.column("also seen by the other") == [16, 16, 0, 0]
    assert table.column("samples") == [16, 16, 8, 8]


def test_without_set_epoch_the_order_repeats() -> None:
    (table,) = loading.orders()
    assert table.column("seen before") == [False, True, True, False, False, False]


def test_with_a_barrier_the_file_is_whole() -> None:
    (table,) = loading.files()
    found, end = table.column("bytes found"), table.column("bytes in the end")
    assert found[2:] == end[2:] == [1_000_000] * 2 and found[0] == end[0]


def test_dropping_and_padding_change_the_accuracy() -> None:
    (table,) = loading.uneven()
    assert table.column("counted") == [4, 6, 5]
    assert table.column("accuracy (%)") == pytest.approx([75, 100 * 4 / 6, 60])


def test_ddp_averages_gradients() -> None:
    (table,) = replicas.gradients()
    assert table.column("gradient") == [4, 8, 6, 6]
    weights = table.column("weight after a step")
    assert weights[0] != weights[1] and weights[2] == weights[3]


def test_ddp_holds_everything_on_every_rank() -> None:
    (table,) = replicas.held()
    assert len(set(table.column("parameters (MiB)"))) == 1 and len(table.rows) == 6


def test_what_is_held_before_in_and_after_a_forward_pass() -> None:
    (table,) = sharding.forward()
    held = {row[0]: [float(x) for x in row[2:]] for row in table.rows}
    assert held["DDP"] == pytest.approx([8, 8, 8, 16], abs=0.2)
    assert held["SHARD_GRAD_OP"] == pytest.approx([4, 13, 12, 8], abs=0.2)
    assert held["FULL_SHARD"] == pytest.approx([4, 5, 4, 8], abs=0.2)


def test_more_groups_hold_less_at_once_and_call_more() -> None:
    (table,) = sharding.groups()
    assert table.column("all-gathers") == [2, 4, 8, 16]
    assert table.column("reduce-scatters") == [1, 2, 4, 8]
    held = table.column("in forward (MiB)")
    assert held == sorted(held, reverse=True) and held[0] > 2 * held[-1]


def test_fsdp_issues_more_collectives_and_holds_less() -> None:
    (table,) = messages.per_step()
    assert table.column("collectives")[1:3] == [3, 24]
    held = table.column("held after it (MiB)")
    assert held[3] > 1.5 * held[4] and all(t > 0 for t in table.column("best (ms)"))


def test_bf16_has_half_the_bytes_and_loses_small_updates() -> None:
    (sizes,) = rounding.bytes_and_time()
    full, half = sizes.column("parameters (MiB)")
    assert half == full / 2 and all(t > 0 for t in sizes.column("time (ms)"))
    (sums,) = rounding.sums()
    assert sums.column("1 + 1,000 times 0.001") == pytest.approx([2, 1, 1], abs=1e-4)
    total = sums.column("4,096 times 0.01")
    assert total[1] < 10 and total[0] == pytest.approx(total[2], rel=0.01)


def test_a_device_is_taken_by_local_rank() -> None:
    (table,) = ending.devices()
    assert sum("IndexError" in text for text in table.column("what is found")) == 1
    (wrong,) = (row for row in table.rows if "IndexError" in row[-1])
    assert (wrong[0], wrong[2]) == ("rank", 1)


def test_what_a_group_leaves() -> None:
    (table,) = ending.left_over()
    sockets, threads = table.column("sockets"), table.column("threads")
    assert sockets[1] > sockets[0] and sockets[2] > sockets[0] and sockets[5] < sockets[4]
    assert threads[2] > threads[0]


def test_a_rank_alone_is_waited_for_and_named() -> None:
    (table,) = ending.alone()
    said, waited = table.column("what it says"), table.column("waited (s)")
    assert "imed out" in said[0] and "Rank 1 failed to pass" in said[2]
    assert min(waited[0], waited[2]) >= ending._WAIT_S * 0.9


def test_the_gradient_grows_without_zero_grad() -> None:
    (table,) = training.gradients()
    assert table.column("norm without")[-1] > 2 * table.column("norm with zero_grad")[-1]


def test_no_grad_saves_memory() -> None:
    (table,) = training.memory()
    kept = table.column("kept for backward (MiB)")
    assert kept[0] == 0 and kept[1] > 50


def test_modes_change_dropout_and_batch_norm() -> None:
    (table,) = training.modes()
    differ, moves = table.column("two passes differ by"), table.column("running mean moves by")
    assert differ[0] > 0 == differ[1] and moves[0] > 0 == moves[1]


def test_only_sums_and_counts_are_the_loss_of_all() -> None:
    (table,) = training.means()
    alone, means, right, one = (table.column(name) for name in table.head[2:])
    assert alone[0] != alone[1] and right == pytest.approx(one)
    assert abs(means[0] - one[0]) > 0.01


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
