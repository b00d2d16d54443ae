"""results.csv and epochs.csv: every run a row, every number from a record, nothing invented."""

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest

from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.tables.column import markdown
from jobkit.analysis.tables.columns import EPOCHS, RESULTS, TABLES
from jobkit.drill.row import Row
from jobkit.metric.line import KINDS
from jobkit.outcome.status import STATUSES
from jobkit.spec.plan import Plan
from jobkit.spec.runspec import SETTINGS
from support import fake_study
from support.fake_study import (
    TRAIN_SAMPLES,
    FakeRun,
    epoch_fields,
    logs,
    make_plan,
    start_fields,
    whole_run,
    whole_study,
)


def row(results: Results, run_id: str) -> pd.Series:
    (index,) = results.runs.index[results.runs["run_id"] == run_id]
    return results.runs.loc[index]


def one_run(**settings: object) -> tuple[Plan, str]:
    plan = make_plan(strategies=("ddp",), gpus=(2,), settings=settings)
    return plan, next(iter(plan.runs))


def test_every_planned_run_has_a_row_whatever_became_of_it() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2), repeats=5)
    ids = iter(plan.runs)
    made = {"ok": next(ids)}
    whole_run(plan, made["ok"])
    lines = {
        "oom": "torch.OutOfMemoryError: CUDA out of memory",
        "timeout": "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026 DUE TO TIME LIMIT ***",
        "preempted": "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026 DUE TO PREEMPTION ***",
        "cancelled": "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026 ***",
        "node_fail": "slurmstepd: error: *** JOB 7 ON n CANCELLED AT 2026 DUE TO NODE FAILURE ***",
        "failed": "srun: error: n1: task 3: Segmentation fault",
        "running": "epoch 1",
    }
    for status, line in lines.items():
        made[status] = next(ids)
        run = FakeRun(plan.paths.folder, made[status], plan.runs[made[status]]).begin().train(0)
        run.print(line)
        run.flush()
    made["pending"] = next(ids)
    made["missing"] = next(ids)
    pending = plan.paths.run(made["pending"])
    pending.folder.mkdir()
    pending.job.write_text('{"launcher": "slurm", "job_id": "5"}')

    results = collect("s")
    assert dict(zip(results.runs["run_id"], results.runs["status"], strict=True)) == {
        run_id: status for status, run_id in made.items()
    }
    assert set(made) == set(STATUSES)
    assert not results.ok
    bad = results.runs[results.runs["status"] != "ok"]
    assert bad["reason"].notna().all()
    # No number was measured where nothing ran, and none is made up.
    empty = row(results, made["missing"])
    assert empty[[c.name for c in RESULTS if c.name in ("images_per_s", "val_loss")]].isna().all()
    assert (empty["world_size"], empty["epochs_done"]) == (plan.runs[made["missing"]].world_size, 0)


def test_the_numbers_are_those_of_the_records() -> None:
    plan, run_id = one_run()
    whole_run(plan, run_id)
    spec, results = plan.runs[run_id], collect("s")
    found = row(results, run_id)
    last = epoch_fields(spec, 2)
    rate = last["images_per_s"]  # the slow first epoch is left out
    assert found["images_per_s"] == rate
    assert found["time_per_epoch_s"] == TRAIN_SAMPLES / rate
    assert found["time_per_epoch_min_s"] == found["time_per_epoch_max_s"] == TRAIN_SAMPLES / rate
    assert found["data_wait_share"] == pytest.approx(0.01)
    assert found["peak_memory_mib"] == 902.0
    assert found["val_accuracy"] == found["best_val_accuracy"] == last["val_accuracy"]
    assert (found["startup_s"], found["total_time_s"]) == (4.5, 30.0)
    assert (found["epochs_planned"], found["epochs_done"], found["attempts"]) == (3, 3, 1)
    assert (found["device"], found["device_planned"]) == ("Some Processor", "auto")
    assert found[["reserved_memory_mib", "cuda_version", "job_id", "reason"]].isna().all()
    for epoch, (_, values) in enumerate(results.epochs.iterrows()):
        for name, value in epoch_fields(spec, epoch).items():
            assert pd.isna(values[name]) if value is None else values[name] == value


def test_a_single_epoch_counts_though_it_is_the_first() -> None:
    plan, run_id = one_run(epochs=1)
    whole_run(plan, run_id)
    rate = epoch_fields(plan.runs[run_id], 0)["images_per_s"]
    assert row(collect("s"), run_id)["images_per_s"] == rate


@pytest.mark.parametrize("lost", ["log", "metrics"])
def test_either_source_alone_gives_the_same(lost: str) -> None:
    plan = whole_study(strategies=("ddp",), gpus=(1, 2), repeats=2)
    both = collect("s", write=False)
    for run_id in plan.runs:
        paths = plan.paths.run(run_id)
        if lost == "log":
            paths.log.unlink()
        else:
            shutil.rmtree(paths.metrics_folder)
            shutil.rmtree(paths.attempts)
    alone = collect("s", write=False)
    # Exit codes stand in the attempts' outcomes only.
    pd.testing.assert_frame_equal(
        alone.runs.drop(columns="exit_code"), both.runs.drop(columns="exit_code")
    )
    pd.testing.assert_frame_equal(alone.epochs, both.epochs)
    assert (alone.rejected, alone.lost) == ((), {})


def test_two_damaged_sources_make_one_whole() -> None:
    plan, run_id = one_run()
    whole_run(plan, run_id)
    whole = collect("s", write=False)
    paths = plan.paths.run(run_id)
    lines = paths.metrics(0).read_bytes().splitlines(keepends=True)
    paths.metrics(0).write_bytes(b"".join(lines[:2] + lines[3:]))
    log = paths.log.read_bytes()
    at = log.index(b'"epoch":1')
    paths.log.write_bytes(log[:at] + b"\xff" + log[at + 5 :])
    found = collect("s", write=False)
    pd.testing.assert_frame_equal(found.epochs, whole.epochs)
    assert [(r.file, r.count) for r in found.rejected] == [(f"{run_id}/train.log", 1)]
    assert found.lost == {}
    assert row(found, run_id)["lines_rejected"] == 1
    assert any("1 [METRIC] line rejected" in line for line in found.warnings())


def test_lost_records_are_counted_and_told() -> None:
    plan, run_id = one_run()
    whole_run(plan, run_id)
    paths = plan.paths.run(run_id)
    lines = paths.metrics(0).read_bytes().splitlines(keepends=True)
    paths.metrics(0).write_bytes(b"".join(lines[:3] + lines[4:]))
    paths.log.unlink()
    results = collect("s", write=False)
    assert results.lost == {run_id: 1}
    assert list(results.epochs["epoch"]) == [0, 2]
    assert f"{run_id}: 1 record lost" in results.warnings()


def test_of_an_epoch_trained_again_the_later_attempt_wins() -> None:
    plan, run_id = one_run()
    spec = plan.runs[run_id]
    FakeRun(plan.paths.folder, run_id, spec).begin().train(0, 1).end("preempted", "USR1", 75)
    FakeRun(plan.paths.folder, run_id, spec, attempt=1).begin(loaded=1).train(1, 2).end()
    results = collect("s")
    assert list(zip(results.epochs["epoch"], results.epochs["attempt"], strict=True)) == [
        (0, 0),
        (1, 1),
        (2, 1),
    ]
    found = row(results, run_id)
    assert (found["status"], found["attempts"], found["epochs_done"]) == ("ok", 2, 3)


@pytest.mark.parametrize(("loaded", "epochs"), [(None, [(0, 1)]), (1, [(0, 0), (1, 1)])])
def test_what_an_attempt_did_beyond_its_checkpoint_is_undone(
    loaded: int | None, epochs: list[tuple[int, int]]
) -> None:
    plan, run_id = one_run()
    spec = plan.runs[run_id]
    FakeRun(plan.paths.folder, run_id, spec).begin().train(0, 1, 2).end("failed", "x", 1)
    again = FakeRun(plan.paths.folder, run_id, spec, attempt=1).begin(loaded=loaded)
    again.train(epochs[-1][0]).end("failed", "x", 1)
    results = collect("s")
    assert list(zip(results.epochs["epoch"], results.epochs["attempt"], strict=True)) == epochs
    assert row(results, run_id)["epochs_done"] == len(epochs)


def test_an_earlier_end_is_not_the_end_of_a_later_attempt() -> None:
    plan, run_id = one_run()
    spec = plan.runs[run_id]
    FakeRun(plan.paths.folder, run_id, spec).begin().train(0).end("failed", "x", 1)
    FakeRun(plan.paths.folder, run_id, spec, attempt=1).begin().train(0).flush()
    found = row(collect("s"), run_id)
    assert found["status"] == "running"
    assert pd.isna(found["total_time_s"])


def test_records_of_another_run_do_not_count() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    one, other = plan.runs
    whole_run(plan, one)
    shutil.copytree(plan.paths.run(one).folder, plan.paths.run(other).folder)
    results = collect("s")
    assert set(results.epochs["run_id"]) == {one}
    assert any("another run" in r.reason for r in results.rejected)


def test_foreign_lines_become_epochs_and_keep_their_own_names() -> None:
    folder = logs() / "mine" / "a"
    folder.mkdir(parents=True)
    (folder / "train.log").write_text(
        "0: [METRIC] epoch=0 val_loss=1.5 my_score=7\n"
        "0: [METRIC] epoch=0 val_accuracy=0.25\n"
        "[METRIC] epoch=1 rank=0 val_loss=0.5\n[METRIC] epoch=1 rank=1 val_loss=9\n"
        "[METRIC] hello=1\n"
    )
    results = collect("mine")
    assert list(results.epochs["epoch"]) == [0, 1]
    assert list(results.epochs["val_loss"]) == [1.5, 0.5]
    assert results.epochs["val_accuracy"].tolist() == [0.25, pd.NA]
    assert results.epochs["my_score"].tolist() == [7.0, pd.NA]
    assert results.runs["val_loss"].tolist() == [0.5]
    assert results.runs["status"].tolist() == ["running"]


def test_slurm_is_asked_after_all_jobs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    good, bad = plan.runs
    whole_run(plan, good)
    FakeRun(plan.paths.folder, bad, plan.runs[bad]).begin().train(0).flush()
    for run_id, job in ((good, "7"), (bad, "8")):
        plan.paths.run(run_id).job.write_text(f'{{"launcher": "slurm", "job_id": "{job}"}}')
    for name, says in (("sacct", "8|TIMEOUT|0:0|00:10:00|n1||"), ("squeue", "")):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\necho "{says}"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    results = collect("s")
    assert row(results, good)["status"] == "ok"
    assert row(results, bad)["status"] == "timeout"
    assert "TIMEOUT" in row(results, bad)["evidence"]
    asked = (tmp_path / "asked").read_text()
    assert asked.count(" -j 7,8 ") == 2  # one sacct and one squeue for all jobs


def test_a_value_that_is_no_number_leaves_its_cell_empty() -> None:
    folder = logs() / "mine" / "a"
    folder.mkdir(parents=True)
    (folder / "train.log").write_text(
        '[METRIC] {"epoch": 0, "val_loss": "low", "lr": true, "iterations": 2.5, "train_loss": 2}\n'
    )
    (epoch,) = collect("mine").epochs.to_dict("records")
    assert all(pd.isna(epoch[k]) for k in ("val_loss", "lr", "iterations"))
    assert epoch["train_loss"] == 2.0


def test_a_folder_without_a_plan_is_collected() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    for run_id in plan.runs:
        whole_run(plan, run_id)
    plan.paths.plan.unlink()
    one, other = sorted(plan.runs)
    plan.paths.run(one).folder.rename(plan.paths.folder / "renamed")
    plan.paths.run(other).spec.unlink()  # run_start says it too
    (plan.paths.folder / "figures").mkdir()
    results = collect(plan.paths.folder)
    assert sorted(results.runs["run_id"]) == sorted(["renamed", other])
    assert results.ok
    assert sorted(results.runs["world_size"]) == [1, 2]
    assert len(results.epochs) == 6


def test_warnings_of_the_runs_are_carried() -> None:
    plan, run_id = one_run()
    run = FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin()
    run.writer.write("message", level="warning", text="2 ranks share 1 core")
    run.writer.write("message", level="info", text="hello")
    run.train(0, 1, 2).end()
    found = row(collect("s"), run_id)
    assert (found["warnings"], found["warnings_text"]) == (1, "2 ranks share 1 core")


def test_folders_that_the_plan_does_not_know_are_told() -> None:
    plan, run_id = one_run()
    whole_run(plan, run_id)
    FakeRun(plan.paths.folder, "extra", plan.runs[run_id]).begin().flush()
    results = collect("s")
    assert results.unplanned == ("extra",)
    assert list(results.runs["run_id"]) == [run_id]


def test_different_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    one, other = plan.runs
    whole_run(plan, one)
    assert collect("s").warnings() == []
    start = fake_study.start_fields
    monkeypatch.setattr(fake_study, "start_fields", lambda spec: start(spec) | {"device": "B"})
    whole_run(plan, other)
    (warning,) = collect("s").warnings()
    assert "Some Processor (1 run)" in warning
    assert "B (1 run)" in warning


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"strategies": ("ddp", "fsdp")}, {"ddp", "fsdp"}),
        ({"sweep": {"precision": ("fp32", "bf16")}}, {"ddp, fp32", "ddp, bf16"}),
        ({"sweep": {"lr": (0.1, 0.2)}}, {"ddp, lr=0.1", "ddp, lr=0.2"}),
        ({"sweep": {"augment": (True, False)}}, {"ddp, augment", "ddp, no augment"}),
        (
            {"sweep": {"global_batch_size": (64, 128)}},
            {"ddp, global_batch_size=64", "ddp, global_batch_size=128"},
        ),
        ({"settings": {"batch_size_per_rank": 64}}, {"ddp"}),
    ],
)
def test_runs_of_one_series_differ_in_size_and_repeat_only(fields, labels) -> None:
    make_plan(**{"strategies": ("ddp",), "gpus": (1, 2), "repeats": 2, **fields})
    assert set(collect("s").runs["series"]) == labels


def test_strong_and_weak_never_share_a_series() -> None:
    strong = make_plan(strategies=("ddp",), gpus=(1, 2), settings={"global_batch_size": 256})
    weak = make_plan(strategies=("ddp",), gpus=(1, 2), settings={"batch_size_per_rank": 256})
    runs = collect("s").runs  # a plan keeps the runs that were planned before
    assert len(runs) == len(strong.runs) + len(weak.runs) == 4
    assert dict(zip(runs["series"], runs["scaling"], strict=True)) == {
        "ddp, strong, global_batch_size=256": "strong",
        "ddp, weak, batch_size_per_rank=256": "weak",
    }


def test_every_setting_and_every_epoch_field_has_a_documented_column() -> None:
    results = [c.name for c in RESULTS]
    assert len(set(results)) == len(results)
    assert set(SETTINGS) - set(results) == {"epochs"}  # epochs_planned
    assert set(KINDS["epoch"]) - {"values"} <= {c.name for c in EPOCHS}
    assert all(c.meaning for columns in TABLES.values() for c in columns)
    assert [c.name for c in TABLES["drill"]] == [f.name for f in fields(Row)]
    assert len(markdown(RESULTS).splitlines()) == len(RESULTS) + 2


def test_a_run_that_did_not_run_as_planned_is_told() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(2,), repeats=2)
    odd, usual = plan.runs
    other = replace(plan.runs[odd], lr=0.5, ranks_per_node=4, data_dir="/elsewhere")
    FakeRun(plan.paths.folder, odd, other).begin().train(0, 1, 2).end()
    whole_run(plan, usual)
    (line,) = collect("s", write=False).warnings()
    assert line == (
        f"{odd}: not run as planned: ranks_per_node=4 (planned: 2), lr=0.5 (planned: 0.05)"
    )


def test_a_run_start_of_which_a_part_is_missing_contradicts_nothing() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1,), settings={"lr": 0.3})
    (run_id,) = plan.runs
    spec = plan.runs[run_id]
    start = start_fields(spec) | {"spec": {"seed": spec.seed}}
    run = FakeRun(plan.paths.folder, run_id, spec)
    run.begin({k: v for k, v in start.items() if k in ("spec",)}).train(0, 1, 2).end()
    assert collect("s", write=False).warnings() == []
