"""results.csv and epochs.csv: every run a row, every number from a record, nothing invented."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.collect.rows import recorded_spec, unplanned_settings
from jobkit.analysis.report.tables import run_costs
from jobkit.analysis.tables.columns import EPOCHS, RESULTS, TABLES
from jobkit.analysis.tables.series import series_labels
from jobkit.drill.faults import Row
from jobkit.files import closed
from jobkit.metric.kinds import KINDS
from jobkit.metric.pattern import load_pattern
from jobkit.outcome.state import STATUSES, run_state
from jobkit.paths import write_json
from jobkit.spec.command import CommandSpec
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan, Study
from support import fake_study
from support.fake_study import (
    TRAIN_SAMPLES,
    FakeRun,
    epoch_fields,
    logs,
    make_plan,
    whole_run,
    whole_study,
)
from support.place import ROOT


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
    epochs = results.epochs["run_id"].value_counts().to_dict()
    assert epochs == {made["ok"]: 3} | {made[status]: 1 for status in lines}
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
    assert found["data_wait_share"] == pytest.approx(0.01)
    assert found["peak_memory_mib"] == 902.0
    assert found["val_accuracy"] == found["best_val_accuracy"] == last["val_accuracy"]
    assert (found["startup_s"], found["total_time_s"]) == (4.5, 30.0)
    assert (found["epochs_planned"], found["epochs_done"], found["attempts"]) == (3, 3, 1)
    assert found["device"] == "Some Processor"
    assert found[["reserved_memory_mib", "cuda_version", "job_id", "reason"]].isna().all()
    for epoch, (_, values) in enumerate(results.epochs.iterrows()):
        for name, value in epoch_fields(spec, epoch).items():
            assert pd.isna(values[name]) if value is None else values[name] == value


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
    assert alone.warnings() == []


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
    assert tuple(row(found, run_id)[["lines_rejected", "records_lost"]]) == (1, 0)
    (warning,) = found.warnings()
    assert warning.startswith(f"{run_id}/train.log: 1 [METRIC] line rejected, the first at byte ")
    paths.log.unlink()
    assert collect("s", write=False).warnings() == [f"{run_id}: 1 record lost"]


@pytest.mark.parametrize(
    ("first", "loaded", "again", "epochs"),
    [
        ((0, 1), 1, (1, 2), [(0, 0), (1, 1), (2, 1)]),
        ((0, 1, 2), None, (0,), [(0, 1)]),
        ((0, 1, 2), 1, (1,), [(0, 0), (1, 1)]),
    ],
)
def test_what_an_attempt_did_beyond_its_checkpoint_is_undone(
    first: tuple[int, ...], loaded: int | None, again: tuple[int, ...], epochs: list[Any]
) -> None:
    plan, run_id = one_run()
    spec = plan.runs[run_id]
    FakeRun(plan.paths.folder, run_id, spec).begin().train(*first).end("preempted", "USR1", 75)
    later = FakeRun(plan.paths.folder, run_id, spec, attempt=1).begin(loaded=loaded)
    later.train(*again).end()
    results = collect("s")
    assert list(zip(results.epochs["epoch"], results.epochs["attempt"], strict=True)) == epochs
    found = row(results, run_id)
    assert (found["status"], found["attempts"], found["epochs_done"]) == ("ok", 2, len(epochs))


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
    for name, says in (("sacct", "8|TIMEOUT|0:0|00:10:00|n1|"), ("squeue", "")):
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


def test_every_epoch_field_has_a_documented_column() -> None:
    results = [c.name for c in RESULTS]
    assert len(set(results)) == len(results)
    assert set(KINDS["epoch"]) - {"values"} <= {c.name for c in EPOCHS}
    assert all(c.meaning for columns in TABLES.values() for c in columns)
    assert [c.name for c in TABLES["drill"]] == [f.name for f in fields(Row)]


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


def test_settings_that_a_command_records_are_not_those_of_the_plan() -> None:
    """The command may be jobkit's own training."""
    start = {"v": 1, "kind": "run_start", "spec": RunSpec(epochs=3).to_dict(), "world_size": 1}
    records = RunRecords([start])
    assert unplanned_settings(CommandSpec(command=("x",)), recorded_spec(records), records) == ""
    assert "epochs=3 (planned: 5)" in unplanned_settings(RunSpec(), recorded_spec(records), records)


def test_a_parameter_makes_a_series_unless_it_follows_from_the_size() -> None:
    specs = {
        f"{batch} at {ranks}": CommandSpec(
            command=("train.py",),
            ranks_per_node=ranks,
            parameters={"batch": batch, "accumulate": 8 // ranks},
            by_size=("accumulate",),
        )
        for batch in (6, 12)
        for ranks in (1, 2)
    }
    labels = series_labels(specs)
    assert labels["6 at 1"] == labels["6 at 2"] == "train, batch=6"
    assert labels["12 at 1"] == "train, batch=12"


def _labels(*commands: str) -> list[str]:
    specs = [CommandSpec(command=tuple(c.split())) for c in commands]
    return list(series_labels({str(i): spec for i, spec in enumerate(specs)}).values())


def test_runs_of_different_commands_are_no_repeats_of_each_other() -> None:
    """The series have the words that differ, an option's value with its option."""
    assert _labels("python fit.py --batch 4", "python fit.py --batch 64") == [
        "fit, --batch 4",
        "fit, --batch 64",
    ]
    assert _labels("python fit.py", "python fit.py --fast", "python fit.py") == [
        "fit",
        "fit, --fast",
        "fit",
    ]
    assert _labels("fit.py --lr 1 --wd 1", "fit.py --lr 1 --wd 2") == ["fit, --wd 1", "fit, --wd 2"]
    assert _labels("fit.py --lr 1", "fit.py --wd 1") == ["fit, --lr 1", "fit, --wd 1"]
    assert _labels("fit.py", "fit.py --lr -1") == ["fit", "fit, --lr -1"]
    # A ; divides the names of series in a table.
    assert _labels("bash -c a;b", "bash -c c") == ["bash, -c a,b", "bash, -c c"]
    # Words of another program say nothing that its name does not.
    assert _labels("python one.py --batch 4", "python two.py") == ["one", "two"]
    assert sorted(_labels("fit.py a b", "fit.py b a")) == ["fit", "fit (variant 2)"]
    long = _labels("fit.py " + "x" * 5000, "fit.py " + "x" * 4999 + "y")
    assert len(set(long)) == 2 and max(map(len, long)) < 300


def test_a_command_without_the_counters_is_a_series_of_its_own() -> None:
    one = CommandSpec(command=("fit.py",))
    found = series_labels({"one": one, "other": replace(one, auto=False)})
    assert found == {"one": "fit, auto", "other": "fit, no auto"}


@pytest.mark.parametrize(
    ("decided", "series"),
    [
        ((("bf16", "tf32"), ("bf16", "tf32")), ["ddp"] * 3),  # the last one has not begun
        ((("bf16", "tf32"), ("fp32", "ieee")), ["ddp, bf16", "ddp, fp32", "ddp, auto"]),
    ],
)
def test_what_was_decided_is_in_the_tables_and_contradicts_no_plan(
    decided: tuple[tuple[str, str], ...], series: list[str]
) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2, 4))
    for (run_id, spec), (precision, fp32) in zip(plan.runs.items(), decided, strict=False):
        actual = replace(spec, precision=precision, fp32=fp32)
        FakeRun(plan.paths.folder, run_id, actual).begin().train(0, 1, 2).end()
    results = collect("s", write=False)
    assert list(results.runs["precision"]) == [*(p for p, _ in decided), "auto"]
    assert list(results.runs["fp32"]) == [*(f for _, f in decided), "auto"]
    assert [", ".join(name.split(", ")[:2]) for name in results.runs["series"]] == series
    assert results.warnings() == []


SAMPLE = load_pattern("nanogpt").sample


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Closes a file or folder to this user, who may be root."""
    shut: list[str] = []

    def wrap(call: Callable[..., Any], below: str) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **more: Any) -> Any:
            text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if text.startswith(tuple(s + below for s in shut)):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
            return call(path, *args, **more)

        return wrapped

    # What is closed itself can be seen to be there.
    for name, below in (("open", ""), ("stat", "/"), ("scandir", "")):
        monkeypatch.setattr(os, name, wrap(getattr(os, name), below))
    return lambda path: shut.append(str(path))


def test_a_run_whose_folder_is_closed_is_said_to_be(close: Callable[[Path], None]) -> None:
    plan = whole_study(strategies=("ddp",), gpus=(1, 2))
    first, other = plan.runs
    paths = plan.paths.run(first)
    assert closed(paths.folder) == closed(paths.folder / "absent") == closed(paths.log) == ""
    close(paths.folder)
    assert closed(paths.folder) == "Permission denied"
    state = run_state(paths)
    assert state.status == "missing"
    assert state.reason == "its folder cannot be read: Permission denied"
    found = collect("s")
    assert dict(zip(found.runs["run_id"], found.runs["status"], strict=True)) == {
        first: "missing",
        other: "ok",
    }
    assert f"{first}/metrics cannot be read: Permission denied" in found.warnings()


def _of_a_pattern() -> Plan:
    """A study of two runs with a log each, that the pattern reads."""
    plan = Study(name="n", gpus=(1,), repeats=2, command=("x",), pattern="nanogpt").expand()
    plan.save()
    for paths in map(plan.paths.run, plan.runs):
        (paths.attempts / "0").mkdir(parents=True)
        paths.log.write_text(SAMPLE)
        write_json(paths.outcome(0), {"exit_code": 0, "status": "ok", "reason": ""})
        write_json(paths.job, {"launcher": "run.sh", "started": 1.0, "ended": 9.0, "exit_code": 0})
    return plan


def test_a_run_whose_log_is_closed_has_no_rate(close: Callable[[Path], None]) -> None:
    """Not that of its wall time either, of another unit than the others'."""
    plan = _of_a_pattern()
    first, other = plan.runs
    close(plan.paths.run(first).log)
    found = collect("n")
    rows = found.runs.set_index("run_id")
    assert list(rows["status"]) == ["ok", "ok"]
    assert rows["throughput"].isna()[first] and not rows["throughput"].isna()[other]
    assert found.sizes[0].note is None
    assert f"{first}/train.log cannot be read: Permission denied" in found.warnings()


PARTS = {"import_s": 2.0, "group_s": 0.5, "data_s": 0.25, "model_s": 0.125}
PARTS |= {"compile_s": None, "first_step_s": 0.75}


def started(seconds: dict[int, float], status: str = "ok") -> Results:
    """A study of which a run took 30 s, so much of it for the start, by number of ranks."""
    plan = make_plan(gpus=tuple(seconds), strategies=("ddp",))
    for run_id, spec in plan.runs.items():
        run = FakeRun(plan.paths.folder, run_id, spec).begin()
        run.writer.write("startup", **PARTS, total_s=seconds[spec.world_size])
        run.train(*range(spec.epochs)).end(status, "" if status == "ok" else "x")
    return collect("s")


def test_what_a_run_takes_beside_its_training_is_a_line_of_its_own() -> None:
    """Of 30 s: 8,192 images at 950, 1,900 and 1,900 images/s, and 0.5 s of evaluation each."""
    results = started({2: 6.0})
    columns = results.runs.iloc[0]
    assert {k: v for k in PARTS if pd.notna(v := columns[f"startup_{k}"])} == {
        k: v for k, v in PARTS.items() if v is not None
    }
    (row,) = run_costs(results).rows
    assert row[1:] == ["2", "30", "17.2", "1.5", "6", "5.25", "74%"]


@pytest.mark.parametrize("status", ["failed", "preempted"])
def test_a_run_that_ended_early_is_in_no_table(status: str) -> None:
    """Its start is much of it by nature."""
    assert run_costs(started({2: 29.0}, status)).rows == []


RECORDED = ROOT / "tests" / "golden" / "recorded"


@pytest.mark.parametrize(("table", "rows"), [("results.csv", 2), ("epochs.csv", 4)])
def test_the_old_columns_are_as_they_were(tmp_path: Path, table: str, rows: int) -> None:
    folder = tmp_path / "recorded"
    shutil.copytree(RECORDED, folder)
    for name in ("results.csv", "epochs.csv"):
        (folder / name).unlink()
    collect(folder)
    before, now = (pd.read_csv(f / table, dtype=str) for f in (RECORDED, folder))
    assert len(before) == rows
    assert set(before.columns) <= set(now.columns)
    keys = [k for k in ("run_id", "epoch") if k in before.columns]
    before, now = (t.sort_values(keys, ignore_index=True) for t in (before, now))
    pd.testing.assert_frame_equal(now[list(before.columns)], before)
