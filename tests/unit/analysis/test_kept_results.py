"""What is kept of a collected study changes no table, whatever became of the files meanwhile."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobkit import cores
from jobkit.analysis.collect import reading
from jobkit.analysis.collect.kept import Kept, decoded, encoded, key_of, mark_of
from jobkit.analysis.collect.results import collect
from jobkit.paths import RunPaths
from jobkit.spec.plan import Plan
from support.fake_study import FakeRun, make_plan, whole_run, whole_study

AN_HOUR_AGO = time.time() - 3600


def settle(folder: Path) -> None:
    """Nothing in the folder was written in the last seconds."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (AN_HOUR_AGO, AN_HOUR_AGO))


def tables(plan: Plan) -> dict[str, object]:
    """Collect; return every table as it was written, and the warnings."""
    results = collect(plan.study.name)
    written = {path.name: path.read_bytes() for path in results.tables}
    return {**written, "warnings": results.warnings()}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose records were read."""
    names: list[str] = []
    real = reading.read_run

    def noted(paths: RunPaths, run_id: str | None) -> object:
        names.append(paths.folder.name)
        return real(paths, run_id)

    monkeypatch.setattr(reading, "read_run", noted)
    return names


def append(run: RunPaths, _: random.Random) -> None:
    with run.log.open("a") as log:
        log.write('[METRIC] {"v":1,"kind":"epo\n')


def truncate(run: RunPaths, draw: random.Random) -> None:
    size = run.metrics(0).stat().st_size
    os.truncate(run.metrics(0), draw.randrange(size // 2, size))


def same_size(run: RunPaths, draw: random.Random) -> None:
    """A digit of a record changes, at any place; its checksum is then wrong."""
    text = bytearray(run.log.read_bytes())
    if places := [i for i, letter in enumerate(text) if letter in b"123456789"]:
        text[draw.choice(places)] ^= 1
    run.log.write_bytes(text)


def replaced(run: RunPaths, _: random.Random) -> None:
    beside = run.folder / "beside"
    beside.write_bytes(run.metrics(0).read_bytes().replace(b"fine", b"good"))
    beside.replace(run.metrics(0))


def again(run: RunPaths, _: random.Random) -> None:
    """Another attempt, which has not ended."""
    spec = Plan.read(run.folder.parent / "plan.json").runs[run.folder.name]
    number = (run.attempt_numbers() or [-1])[-1] + 1
    FakeRun(run.folder.parent, run.folder.name, spec, number).begin().train(0).flush()


def gone(run: RunPaths, _: random.Random) -> None:
    run.log.unlink(missing_ok=True)
    run.log.touch()


CHANGES: tuple[Callable[[RunPaths, random.Random], None], ...] = (
    append, truncate, replaced, same_size, again, gone,
)  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_tables_are_equal_byte_for_byte_with_and_without_it(seed: int, read: list[str]) -> None:
    draw, plan = random.Random(seed), whole_study(strategies=("ddp",), gpus=(1, 2), repeats=2)
    ids = list(plan.runs)
    settle(plan.paths.folder)
    for change in (None, *draw.sample(CHANGES, len(CHANGES))):
        if change:
            run = plan.paths.run(draw.choice(ids))
            change(run, draw)
            settle(run.folder)
        with_it = tables(plan)
        plan.paths.collected.rename(plan.paths.folder / "before")
        assert with_it == tables(plan), change
        (plan.paths.folder / "before").replace(plan.paths.collected)
    assert len(read) < 2 * len(ids) * (len(CHANGES) + 1)


def test_only_what_changed_is_read_again(read: list[str]) -> None:
    plan = whole_study(strategies=("ddp",), gpus=(1, 2), repeats=2)
    settle(plan.paths.folder)
    before = tables(plan)
    assert sorted({*read}) == sorted(plan.runs)
    read.clear()
    assert tables(plan) == before
    assert read == []
    changed = next(iter(plan.runs))
    append(plan.paths.run(changed), random.Random(0))
    settle(plan.paths.run(changed).folder)
    after = tables(plan)
    assert read == [changed]
    assert after["results.csv"] != before["results.csv"]  # it counts the rejected line


def test_a_run_that_has_not_ended_or_was_just_written_is_read_each_time(
    read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm is asked
    plan = make_plan(strategies=("ddp",), gpus=(1,), repeats=3)
    open_run, new, old = plan.runs
    FakeRun(plan.paths.folder, open_run, plan.runs[open_run]).begin().train(0).flush()
    for run_id in (new, old):
        whole_run(plan, run_id)
    settle(plan.paths.folder)
    job = plan.paths.run(open_run).job
    job.write_text('{"host": "elsewhere", "job_id": "1", "started": 1.0, "ended": null, "pid": 1}')
    ahead = time.time() + 3600
    os.utime(plan.paths.run(new).metrics(0), (ahead, ahead))
    collect(plan.study.name)
    read.clear()
    collect(plan.study.name)
    assert sorted(read) == sorted([open_run, new])


def test_a_mark_tells_files_apart_by_more_than_size_and_time(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "r")
    run.metrics_folder.mkdir(parents=True)
    run.log.write_text("x" * 9)
    run.metrics(0).write_text("y" * 9)
    settle(tmp_path)
    marks = [mark_of(run)]
    beside = run.folder / "beside"
    beside.write_text("z" * 9)
    beside.replace(run.log)
    settle(tmp_path)
    marks.append(mark_of(run))
    assert None not in marks and marks[0] != marks[1]
    assert marks[1] == mark_of(run)


@pytest.mark.parametrize("name", ["train.log", "metrics/0.jsonl", "metrics", "."])
def test_nothing_is_kept_of_a_run_with_a_link(tmp_path: Path, name: str) -> None:
    run = RunPaths(tmp_path / "s" / "r")
    run.metrics_folder.mkdir(parents=True)
    run.log.write_text("x")
    run.metrics(0).write_text("y")
    settle(tmp_path)
    assert mark_of(run) is not None
    (run.folder / name).rename(tmp_path / "other")
    (run.folder / name).symlink_to(tmp_path / "other")
    assert mark_of(run) is None


def test_several_processes_read_what_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = whole_study(strategies=("ddp", "fsdp"), gpus=(1, 2), repeats=3)
    settle(plan.paths.folder)
    before = tables(plan)
    plan.paths.collected.unlink()
    monkeypatch.setattr(cores, "SHARE", 2)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(cores.threading, "active_count", lambda: 1)  # others' may go on
    read_here = []
    real = reading.read_run
    monkeypatch.setattr(reading, "read_run", lambda *a: read_here.append(a) or real(*a))
    assert tables(plan) == before
    assert tables(plan) == before, "what they kept"
    assert not read_here, "read by this process"


@pytest.mark.parametrize("spoil", ["bits", "cut", "version", "writable", "folder", "absent"])
def test_a_broken_or_foreign_file_does_no_harm(spoil: str, read: list[str]) -> None:
    plan = whole_study(strategies=("ddp",), gpus=(1,), repeats=2)
    settle(plan.paths.folder)
    before, kept = tables(plan), plan.paths.collected
    text = bytearray(kept.read_bytes())
    head = text.index(b"\n")
    if spoil == "bits":
        for at in range(head + 1, len(text), 97):
            text[at] ^= 1
    elif spoil == "cut":
        del text[len(text) // 2 :]
    elif spoil == "version":
        text[head - 1] ^= 1
    kept.write_bytes(text)
    if spoil == "writable":
        kept.chmod(0o666)
    elif spoil in ("folder", "absent"):
        kept.unlink()
    if spoil == "folder":
        kept.mkdir()
    read.clear()
    assert tables(plan) == before
    assert read, "nothing was read again"


def test_what_json_cannot_say_is_not_kept(tmp_path: Path) -> None:
    kept, values = Kept(tmp_path / "kept"), [1 << 70, "\ud800"]
    keys = [key_of(number) for number in range(len(values) + 1)]
    lines = [encoded({"value": value}) for value in [*values, 1.5]]
    assert lines[:-1] == [None] * len(values)
    assert encoded({"of": [float("nan"), float("inf"), 0.1]}) == b'{"of":[null,null,0.1]}'
    for key, line in zip(keys, lines, strict=True):
        if line:
            kept.keep(key, line)
    kept.save()
    (tmp_path / "kept").chmod(0o600)  # whatever the umask is
    again = Kept(tmp_path / "kept")
    found = [decoded(again.take(key)) if key in again else None for key in keys]
    assert found == [*[None] * len(values), {"value": 1.5}]
