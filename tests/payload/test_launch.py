"""Real launches through run.sh and torchrun: what a run leaves, and how it fails or is stopped."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.metric.kinds import COMMON, KINDS
from jobkit.metric.reader import scan
from support.place import ROOT, until
from support.rigs import SMALL, Result, Start, environment, processes_with

TINY = [*SMALL, "--epochs", "2", "--global-batch-size", "128"]

# A user's model whose second rank may break in the third training step. atexit must not run:
# it stands for what crashes when Python takes a process down that still has native threads.
MODEL = """
import atexit, os
from torch import nn

atexit.register(os.abort)

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3072, 10)
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        if self.steps == 3 and os.environ["RANK"] == os.environ.get("BREAKS"):
            raise ArithmeticError("broken on\\npurpose")
        return self.linear(x.flatten(1))
"""


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    (tmp_path / "my code").mkdir()
    (tmp_path / "my code" / "mine.py").write_text(MODEL)
    return tmp_path / "my code"


def test_what_a_run_leaves_and_its_repetition_from_spec_json(launch, forge, own_model) -> None:
    """Its success is not spoilt by the end of the process, which aborts."""
    words = ["--why", "4", "--momentum", "0.8", "--seed", "3", "--model", "mine:Mine"]
    done = launch("--nproc-per-node", "2", *TINY, *words, cwd=own_model)
    assert done.codes == [0], done.out
    assert "ChildFailedError" not in done.out and "warning" not in done.out
    for line in ("backend gloo, 2 processes on 1 node, master ", "[Rank 0] host", "[Rank 1] host"):
        assert line in done.out
    check_records(done)
    assert done.outcome is not None
    assert (done.outcome["status"], done.outcome["exit_code"]) == ("ok", 0)
    for rank in (0, 1):
        log = done.paths.rank_log(0, rank).read_text()
        assert f" rank {rank} INFO epoch 1, this rank: " in log
        assert all(line[:4].isdigit() for line in log.splitlines())

    again = forge(2, "--spec", str(done.paths.spec), cwd=own_model)
    assert again.losses() == pytest.approx(done.losses(), rel=1e-5)
    assert again.record("run_start")["spec"] == done.record("run_start")["spec"]
    assert not again.records("message")

    changes = ["--epochs", "1", "--batch-size-per-rank", "64"]
    other = forge(1, "--spec", str(done.paths.spec), *changes, cwd=own_model)
    settings = other.record("run_start")["spec"]
    assert {"epochs": 1, "seed": 3, "batch_size_per_rank": 64}.items() <= settings.items()
    assert "global_batch_size" not in settings


def check_records(done: Result) -> None:
    """Every record has exactly its kind's fields; the log mirrors the file; nothing is lost."""
    lines = done.paths.metrics(0).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kinds = [r["kind"] for r in records]
    # How many windows there are depends on the speed.
    others = ["run_start", "startup", "difference", "epoch", "epoch", "run_end"]
    assert [kind for kind in kinds if kind != "window"] == others
    assert [r["seq"] for r in records] == list(range(len(records)))
    for kind in set(kinds) - {"run_start"}:
        record = done.records(kind)[0]
        own = {"values"} if kind == "epoch" else set[str]()  # those of other programs
        assert set(record) == {*COMMON, *KINDS[kind]} - own
    start = done.record("run_start")
    of_programs = {"source", "unit", "work_per_step", "work_source", "warmup_steps", "group_size"}
    assert set(start) - {"crc"} == {*COMMON, *KINDS["run_start"]} - of_programs
    assert (start["world_size"], start["backend"], start["global_batch_size"]) == (2, "gloo", 128)
    startup, epoch, end = (done.records(k)[0] for k in ("startup", "epoch", "run_end"))
    assert startup["compile_s"] is None
    parts = sum(startup[name] for name in ("import_s", "group_s", "data_s", "model_s"))
    assert 0 < parts <= startup["total_s"] < end["total_time_s"]
    assert 0 < startup["first_step_s"] < end["total_time_s"] - startup["total_s"]
    # 4 steps of 128, of which the first 3 warm up.
    assert (epoch["iterations"], epoch["timed_images"]) == (4, 128)
    assert epoch["images_per_s"] == pytest.approx(128 / epoch["epoch_time_s"])
    assert 0 <= epoch["data_wait_s"] <= epoch["epoch_time_s"]
    assert done.records("epoch")[1]["timed_images"] == 512
    assert len(list(scan(io.BytesIO(done.out.encode())))) == len(records)


def test_a_rank_that_fails_ends_the_run(launch: Start, own_model: Path) -> None:
    words = ["--nproc-per-node", "2", *TINY, "--model", "mine:Mine"]
    done = launch(*words, cwd=own_model, BREAKS="1")
    assert done.codes == [1], done.out
    until(lambda: not processes_with(done.paths.folder), "the end of its processes")
    assert "[rank1] Traceback (most recent call last):" in done.out
    assert "[rank1] ArithmeticError: broken on" in done.out
    assert done.outcome is not None
    assert done.outcome["reason"] == "rank 1: ArithmeticError: broken on purpose"
    assert " rank 1 ERROR Traceback" in done.paths.rank_log(0, 1).read_text()
    for end in done.records("run_end"):  # where rank 0 could still say it
        assert (end["status"], end["reason"]) == ("failed", done.outcome["reason"])


@pytest.mark.long
def test_two_machines_train_as_one_and_stop_together(tmp_path: Path) -> None:
    """torchrun on each of them; the stop signal comes to the second one alone."""
    words = ["bash", str(ROOT / "run.sh"), "--nnodes", "2", "--master-addr", "127.0.0.1"]
    words += ["--master-port", "29431", "--nproc-per-node", "1", "--run-dir", str(tmp_path / "run")]
    words += [*TINY, "--epochs", "100000", "--device", "cpu", "--node-rank"]
    env = environment(JOBKIT_PYTHON=sys.executable)
    machines = [subprocess.Popen([*words, number], env=env) for number in "01"]
    try:
        records = tmp_path / "run" / "metrics" / "0.jsonl"
        until(lambda: records.exists() and '"kind":"epoch"' in records.read_text(), "an epoch")
        machines[1].send_signal(signal.SIGUSR2)
        assert [machine.wait(480) for machine in machines] == [75, 75]
    finally:
        for machine in machines:
            machine.terminate()
            machine.wait()
    outcome = json.loads((tmp_path / "run" / "attempts" / "0" / "outcome.json").read_text())
    assert outcome["status"] == "preempted" and "SIGUSR2" in outcome["reason"]
    assert list((tmp_path / "run" / "checkpoints").iterdir())
