"""results.csv and epochs.csv: every run a row, every number from a record, nothing invented."""

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from jobkit.analysis.collect.records import RunRecords
from jobkit.analysis.collect.results import Results, collect
from jobkit.analysis.collect.rows import ranks_together
from jobkit.analysis.report.tables import project_table, proposal_table, run_costs
from jobkit.analysis.tables.columns import TABLES
from jobkit.analysis.tables.series import _BATCH, SAME, faults, odd_works, series_labels
from jobkit.drill.faults import Row
from jobkit.metric.kinds import KINDS
from jobkit.metric.pattern import load_pattern
from jobkit.paths import write_json
from jobkit.spec.command import CommandSpec
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan, Study
from support.fake_study import FakeRun, logs, make_plan, whole_run, whole_study
from support.place import script


def rows_of(results: Results) -> dict[str, pd.Series]:
    return {str(row["run_id"]): row for _, row in results.runs.iterrows()}


def one_run(**settings: object) -> tuple[Plan, str]:
    plan = make_plan(strategies=("ddp",), gpus=(2,), settings=settings)
    return plan, next(iter(plan.runs))


def test_every_planned_run_has_a_row_whatever_became_of_it() -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2), repeats=2)
    made = dict(zip(("ok", "oom", "pending", "missing"), plan.runs, strict=True))
    whole_run(plan, made["ok"])
    run = FakeRun(plan.paths.folder, made["oom"], plan.runs[made["oom"]]).begin().train(0)
    run.print("torch.OutOfMemoryError: CUDA out of memory")
    run.flush()
    pending = plan.paths.run(made["pending"])
    pending.folder.mkdir()
    pending.job.write_text('{"launcher": "slurm", "job_id": "5"}')

    results = collect("s")
    found = rows_of(results)
    assert {row["status"]: run_id for run_id, row in found.items()} == made and not results.ok
    assert results.runs.loc[results.runs["status"] != "ok", "reason"].notna().all()
    assert results.epochs["run_id"].value_counts().to_dict() == {made["ok"]: 3, made["oom"]: 1}
    # No number was measured where nothing ran, and none is made up.
    empty = found[made["missing"]]
    assert empty[["throughput", "val_loss"]].isna().all()
    assert (empty["world_size"], empty["epochs_done"]) == (plan.runs[made["missing"]].world_size, 0)


def test_two_damaged_sources_make_one_whole() -> None:
    plan, run_id = one_run()
    whole_run(plan, run_id)
    whole = collect("s", write=False)
    paths = plan.paths.run(run_id)
    lines = paths.metrics(0).read_bytes().splitlines(keepends=True)
    paths.metrics(0).write_bytes(b"".join(lines[:2] + lines[3:]))
    log = paths.log.read_bytes()  # which alone has all of it too
    at = log.index(b'"epoch":1')
    paths.log.write_bytes(log[:at] + b"\xff" + log[at + 5 :])
    found = collect("s", write=False)
    pd.testing.assert_frame_equal(found.epochs, whole.epochs)
    assert tuple(rows_of(found)[run_id][["lines_rejected", "records_lost"]]) == (1, 0)
    (warning,) = found.warnings()
    assert warning.startswith(f"{run_id}/train.log: 1 [METRIC] line rejected, the first: ")
    paths.log.unlink()
    assert collect("s", write=False).warnings() == [f"{run_id}: 1 record lost"]
    paths.log.write_bytes(log)
    shutil.rmtree(paths.metrics_folder)
    pd.testing.assert_frame_equal(collect("s", write=False).runs, whole.runs)


def test_of_an_epoch_that_was_trained_again_the_newest_record_counts() -> None:
    plan, run_id = one_run()
    spec = plan.runs[run_id]
    FakeRun(plan.paths.folder, run_id, spec).begin().train(0, 1).end("preempted", "USR1", 75)
    FakeRun(plan.paths.folder, run_id, spec, attempt=1).begin().train(1, 2).end()
    results = collect("s")
    epochs = list(zip(results.epochs["epoch"], results.epochs["attempt"], strict=True))
    assert epochs == [(0, 0), (1, 1), (2, 1)]
    found = rows_of(results)[run_id]
    assert (found["status"], found["attempts"], found["epochs_done"]) == ("ok", 2, 3)


def test_foreign_lines_become_epochs_and_keep_their_own_names() -> None:
    """A value that is no number leaves its cell empty."""
    folder = logs() / "mine" / "a"
    folder.mkdir(parents=True)
    (folder / "train.log").write_text(
        "0: [METRIC] epoch=0 val_loss=1.5 my_score=7\n"
        "0: [METRIC] epoch=0 val_accuracy=0.25\n"
        "[METRIC] epoch=1 rank=0 val_loss=0.5\n[METRIC] epoch=1 rank=1 val_loss=9\n"
        "[METRIC] hello=1\n[METRIC] kind=window step=3 steps=2 wall_s=1\n"
        "[METRIC] epoch=2 val_loss=low lr=yes iterations=2.5\n"
    )
    epochs = collect("mine").epochs
    assert list(epochs["epoch"]) == [0, 1, 2]
    assert epochs["val_loss"].tolist() == [1.5, 0.5, pd.NA]
    assert epochs["val_accuracy"].tolist() == [0.25, pd.NA, pd.NA]
    assert epochs["my_score"].tolist() == [7.0, pd.NA, pd.NA]
    assert epochs[["lr", "iterations"]].isna().all(axis=None)


def test_slurm_is_asked_after_all_jobs_at_once(tmp_path: Path, monkeypatch) -> None:
    plan = make_plan(strategies=("ddp",), gpus=(1, 2))
    good, bad = plan.runs
    whole_run(plan, good)
    FakeRun(plan.paths.folder, bad, plan.runs[bad]).begin().train(0).flush()
    for run_id, job in ((good, "7"), (bad, "8")):
        write_json(plan.paths.run(run_id).job, {"launcher": "slurm", "job_id": job})
    for name, says in (("sacct", "8|TIMEOUT|0:0|00:10:00|n1"), ("squeue", "")):
        script(tmp_path / name, f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked; echo "{says}"')
    monkeypatch.setenv("PATH", f"{tmp_path}", prepend=":")
    found = rows_of(collect("s"))
    assert [found[run_id]["status"] for run_id in (good, bad)] == ["ok", "timeout"]
    assert "TIMEOUT" in found[bad]["evidence"]
    # One sacct and one squeue for all jobs.
    assert (tmp_path / "asked").read_text().count(" -j 7,8 ") == 2


def test_a_folder_without_a_plan_is_collected() -> None:
    """Each run by its spec.json or, without one, by what it wrote at its start."""
    plan = whole_study(strategies=("ddp",), gpus=(1, 2))
    plan.paths.plan.unlink()
    one, other = sorted(plan.runs)
    plan.paths.run(one).folder.rename(plan.paths.folder / "renamed")
    plan.paths.run(other).spec.unlink()
    results = collect("s")
    assert sorted(results.runs["run_id"]) == sorted(["renamed", other]) and results.ok
    assert sorted(results.runs["world_size"]) == [1, 2] and len(results.epochs) == 6
    assert {*results.runs["series"]} == {"ddp", f"{other} (settings unknown)"}


def test_messages_are_counted_and_folders_that_the_plan_does_not_know_are_not_read() -> None:
    plan, run_id = one_run()
    run = FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin()
    run.writer.write("message", level="warning", text="2 ranks share 1 core")
    run.writer.write("message", level="info", text="hello")
    run.train(0, 1, 2).end()
    FakeRun(plan.paths.folder, "extra", plan.runs[run_id]).begin().flush()
    results = collect("s")
    (found,) = rows_of(results).values()
    assert (found["warnings"], found["warnings_text"]) == (1, "2 ranks share 1 core")


def test_runs_of_one_series_differ_in_size_and_repeat_only() -> None:
    fields: dict[str, Any]
    for fields, labels in (
        ({"strategies": ("ddp", "fsdp")}, {"ddp", "fsdp"}),
        ({"sweep": {"precision": ("fp32", "bf16")}}, {"ddp, fp32", "ddp, bf16"}),
        ({"sweep": {"lr": (0.1, 0.2)}}, {"ddp, lr=0.1", "ddp, lr=0.2"}),
        ({"sweep": {"augment": (True, False)}}, {"ddp, augment", "ddp, no augment"}),
        ({"settings": {"batch_size_per_rank": 64}}, {"ddp"}),
    ):
        plan = make_plan(**{"strategies": ("ddp",), "gpus": (1, 2), "repeats": 2, **fields})
        assert set(series_labels(plan.runs).values()) == labels


def test_strong_and_weak_never_share_a_series() -> None:
    batches = ({"global_batch_size": 256}, {"batch_size_per_rank": 256})
    plans = [make_plan(strategies=("ddp",), gpus=(1, 2), settings=batch) for batch in batches]
    labels = {"ddp, strong, global_batch_size=256", "ddp, weak, batch_size_per_rank=256"}
    assert set(series_labels(plans[0].runs | plans[1].runs).values()) == labels
    # A command has other settings: neither is named by those of the other kind.
    crash, weak = (CommandSpec(command=("x",), name="crash", scaling=s) for s in (None, "weak"))
    mixed = series_labels({**plans[0].runs, "a": crash, "b": weak})
    assert set(mixed.values()) == {"ddp", "crash", "crash, weak"}


def test_every_field_of_an_epoch_and_of_a_drill_has_a_column_and_none_has_two() -> None:
    names = {table: [column.name for column in columns] for table, columns in TABLES.items()}
    assert [table for table, columns in names.items() if len({*columns}) < len(columns)] == []
    for kind, table in (("epoch", "epochs"), ("sample", "samples")):
        absent = KINDS[kind].keys() - {"values", *names[table]}
        assert not absent, f"add to {table.upper()} in analysis/tables/columns.py: {absent}"
    assert list(KINDS["comm"]) == names["comm"]
    assert names["drill"] == [field.name for field in fields(Row)]


def test_what_was_decided_is_in_the_tables_and_contradicts_no_plan() -> None:
    """The last one has not begun."""
    decided = (("bf16", "tf32"), ("bf16", "tf32"))
    plan = make_plan(strategies=("ddp",), gpus=(1, 2, 4))
    for (run_id, spec), (precision, fp32) in zip(plan.runs.items(), decided, strict=False):
        actual = replace(spec, precision=precision, fp32=fp32)
        FakeRun(plan.paths.folder, run_id, actual).begin().train(0, 1, 2).end()
    results = collect("s", write=False)
    assert list(results.runs["precision"]) == [*(p for p, _ in decided), "auto"]
    assert list(results.runs["fp32"]) == [*(f for _, f in decided), "auto"]
    assert list(results.runs["series"]) == ["ddp"] * 3
    assert results.warnings() == []


def test_a_run_whose_log_cannot_be_read_has_no_rate(tmp_path: Path, monkeypatch) -> None:
    """Not that of its wall time either, of another unit than the others'."""
    plan = Study(name="n", gpus=(1,), repeats=2, command=("x",), pattern="nanogpt").expand()
    plan.save()
    for paths in map(plan.paths.run, plan.runs):
        (paths.attempts / "0").mkdir(parents=True)
        paths.log.write_text(load_pattern("nanogpt").sample)
        write_json(paths.outcome(0), {"exit_code": 0, "status": "ok", "reason": ""})
        write_json(paths.job, {"launcher": "run.sh", "started": 1.0, "elapsed_s": 8.0})
    first, other = plan.runs
    shut = plan.paths.run(first).log
    shut.rename(tmp_path / "elsewhere")
    shut.symlink_to(tmp_path / "elsewhere")  # out of the study
    found = collect("n")
    rows = rows_of(found)
    assert [row["status"] for row in rows.values()] == ["ok", "ok"]
    assert pd.isna(rows[first]["throughput"]) and pd.notna(rows[other]["throughput"])
    assert f"{first}/train.log cannot be read: a link that leads out" in str(found.warnings())
    plan.paths.run(other).log.write_text("a program that says nothing of its steps\n")
    said = rows_of(collect("n"))[other]  # has that of its wall time
    assert (said["throughput"], said["throughput_unit"]) == (3600 / 8, "runs/h")
    monkeypatch.setattr("jobkit.analysis.collect.records.closed", lambda _: "Permission denied")
    assert f"{other}/metrics cannot be read: Permission denied" in collect("n").warnings()


def test_the_best_evidence_of_ranks_that_work_together_counts() -> None:
    for planned, group_size, seen, evidence in (
        ({}, 2, "none", "process group"),
        ({}, 1, "none", "none"),
        ({}, None, "shared memory", "shared memory"),
        ({"together": True}, None, "none", "stated"),
        ({"launcher": "once"}, 2, "none", None),
        ({"ranks_per_node": 1}, None, "none", None),
        ({}, None, None, "unknown"),
    ):
        start = {"v": 1, "kind": "run_start", "attempt": 0, "group_size": group_size}
        records, job = RunRecords([start]), {"ranks_together": seen, "elapsed_s": 1.0}
        facts: dict[str, Any] = {"command": ("python", "train.py"), "ranks_per_node": 2} | planned
        assert ranks_together(job, records, CommandSpec(**facts)) == evidence
        assert ranks_together(job, records, RunSpec(ranks_per_node=2)) is None


def test_a_series_of_copies_is_not_compared_and_its_neighbour_is() -> None:
    names = ("scaling", "train_samples", *_BATCH.values(), "throughput", "step_time_s")
    empty = dict.fromkeys((*SAME, *names))
    rows = [
        empty | {"series": s, "strategy": s, "status": "ok", "world_size": 4, "ranks_together": x}
        for s, x in (("copied", "none"), ("ddp", "connection"), ("short", None))
    ]
    rows += [rows[1] | {"series": "cut", "train_samples": count} for count in (10, 20)]
    grows = {"series": "grows", "scaling": "strong", "step_time_s": 1.0, "throughput_unit": "a/s"}
    rows += [rows[1] | grows | {"throughput": 64.0 * n, "world_size": n} for n in (1, 8)]
    found = faults(pd.DataFrame(rows))
    (odd,) = odd_works(pd.DataFrame(rows))
    assert odd.startswith("grows: the work of a step is 64 on 1 and 512 on 8 ranks: is the scaling")
    assert found.pop("grows", None) is None  # its time may be that of a micro-step
    assert found.pop("cut") == "train_samples differs (10.0, 20.0)"  # epochs of other lengths
    ((series, why),) = found.items()
    assert series == "copied" and why.startswith("4 copies: nothing shows that the ranks worked")


def test_what_a_run_takes_beside_its_training_is_a_line_of_its_own() -> None:
    """Of 30 s: three times 8,192 images at 1,900 images/s, and 0.5 s of evaluation each.

    A run that ended early is in no table: its start is much of it by nature.
    """
    costs = [["2", "30", "12.9", "1.5", "6", "9.57", "132%"]]
    long = [["2", "30", "12.9", "1.5", "20", "-", "132%"]]  # of two clocks
    cases = ("s", "ok", 6.0, costs), ("t", "failed", 6.0, []), ("u", "ok", 20.0, long)
    for name, status, startup_s, rows in cases:
        plan = make_plan(name, strategies=("ddp",), gpus=(2,))
        (run_id,) = plan.runs
        run = FakeRun(plan.paths.folder, run_id, plan.runs[run_id]).begin()
        run.writer.write("startup", total_s=startup_s)
        run.train(0, 1, 2).end(status, "x" * bool(not rows))
        assert [row[1:] for row in run_costs(collect(name)).rows] == rows
    results, top = collect("s"), "start-up, evaluation and checkpoints outside of the steps come on"
    top += " top, 132% of the training in these runs"
    for source, says in (
        ("meter", top),
        ("pattern x (y), start-up included", "rates are of pattern x (y), start-up included"),
        ("pattern x (y)", f"rates are of pattern x (y); {top}"),
    ):
        results.runs["throughput_source"] = source
        assert f"Hours are means: {says}." in proposal_table(results, "ranks").notes
    (note,) = project_table(results, "9 epochs", 1, "ranks").notes
    assert "top, 132% of the training in these runs. " in note and note.endswith(" use these yet.")
    results.runs["attempts"] = 2
    assert run_costs(results).notes[0].endswith(" Left out because of restarts: 1 run.")
