"""The communication benchmark with real ranks: every operation, its check, the files it leaves."""

import json
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jobkit.checks import collectives
from jobkit.checks import comm as cli
from jobkit.checks.collectives import Bench, Team, Timing, exchange
from jobkit.checks.requests import CommRequest
from jobkit.errors import UsageError
from jobkit.metric import comm
from jobkit.metric.reader import read_file
from jobkit.paths import RunPaths, read_json
from jobkit.payload.place import RankEnv
from support.rigs import environment

SIZE = 5000  # neither a multiple of a rank's part nor of the pattern


def be_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = {}
    for name in comm.OPERATIONS:
        if name == "sendrecv" and world != 2:
            continue
        made = exchange(name, Team(tuple(range(world)), rank, torch.device("cpu")), SIZE)
        made.prepare()
        before = made.is_right()
        made.run()
        after = made.is_right()
        made.prepare()
        made.run()
        found[name] = [before, after, made.is_right(), made.bytes]
    Path(folder, f"{world}-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_is_right_and_would_be_seen_wrong(world, tmp_path, fork_server) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=be_rank, args=(r, world, str(tmp_path))) for r in range(world)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(600)
    assert [one.exitcode for one in ranks] == [0] * world
    told = [json.loads((tmp_path / f"{world}-{r}").read_text()) for r in range(world)]
    expected = set(comm.OPERATIONS) - (set() if world == 2 else {"sendrecv"})
    for name in expected:
        before, after, again, sizes = zip(*(one[name] for one in told), strict=True)
        assert all(after) and all(again), name
        # What lies there before it ran is wrong on every rank; the sender of a broadcast has it.
        assert before == (name == "broadcast", *[False] * (world - 1)), name
        assert set(sizes) == {SIZE // 4 // world * world * 4}
    assert set(told[0]) == expected


def test_a_run_leaves_records_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, called = tmp_path / "my comm", []
    monkeypatch.setattr(os, "execvp", lambda file, words: called.append(words))
    words = ["--max-bytes", "16K", "--iterations", "4", "--run-dir", str(folder)]
    cli.main(["--nproc-per-node", "2", *words])
    done = subprocess.run(
        called[0], env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    paths = RunPaths(folder)
    found = comm.read_csv(paths.comm_csv)
    assert [(s.operation, s.bytes) for s in found] == [
        (name, size) for name in comm.OPERATIONS for size in (1024, 4096, 16384)
    ]
    assert all(s.correct and s.ranks == 2 and s.nodes == 1 for s in found)
    assert all(0 < s.time_low_s <= s.time_s <= s.time_high_s for s in found)
    assert {s.scope for s in found if s.operation == "sendrecv"} == {"intra_node"}
    with paths.metrics(0).open("rb") as stream:
        records = [r for r in read_file(stream) if isinstance(r, dict)]
    assert [r["time_s"] for r in records if r["kind"] == "comm"] == [s.time_s for s in found]
    (start,) = [r for r in records if r["kind"] == "run_start"]
    assert (start["backend"], start["world_size"]) == ("gloo", 2)
    assert records[-1]["kind"] == "run_end" and records[-1]["status"] == "ok"
    assert comm.read_lines(paths.comm_json) == comm.fit_lines(found)
    assert (read_json(paths.outcome(0)) or {})["status"] == "ok"
    assert done.stdout.count("[METRIC]") == len(records)
    assert f"next: python -m jobkit plot-comm {folder}" in done.stdout


# --- decisions, with ranks that are made up --------------------------------------------------


class Alone:
    device = torch.device("cpu")

    def __init__(self, world: int = 2, nodes: int = 1) -> None:
        self.place = RankEnv(world_size=world, local_world_size=world // nodes)

    def gather(self, value):
        return [value]


class Notes:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.records: list[dict] = []

    def say(self, line: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def record(self, kind: str, **fields) -> None:
        assert kind == "comm"
        self.records.append(fields)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    def make(seconds=1e-3, right=True, free=2**40, **request) -> tuple[Bench, Notes]:
        def timed(made, team, count):
            if isinstance(seconds, Exception):
                raise seconds
            return [seconds] * count

        class Made:
            bytes = 4096

            def is_right(self) -> bool:
                return right

        monkeypatch.setattr(collectives, "timed", timed)
        monkeypatch.setattr(collectives, "exchange", lambda *_: Made())
        monkeypatch.setattr(collectives, "free_bytes", lambda *_: free)
        monkeypatch.setattr(collectives.dist, "new_group", lambda members: members)
        notes = Notes()
        return Bench(Alone(), CommRequest(operations=("all_reduce",), **request), notes), notes

    return make


def test_iterations_fit_in_the_seconds_but_three_there_are(bench) -> None:
    for seconds, expected in ((1e-3, 20), (0.1, 10), (0.9, 3)):
        made, _ = bench(seconds)
        assert {s.iterations for s in made.run()} == {expected}
    made, _ = bench(0.9, iterations=2)
    assert {s.iterations for s in made.run()} == {2}
    made, notes = bench(2.0)
    assert len(made.run()) == 1
    (said,) = notes.warnings
    assert said == "all_reduce stops at 1 KiB: it takes 2 s, and --seconds-per-size is 1"


def test_an_operation_that_the_backend_lacks_is_skipped(bench) -> None:
    made, notes = bench(RuntimeError("ProcessGroupX does not support all_reduce\nC++ trace"))
    assert made.run() == []
    assert notes.warnings == ["all_reduce is skipped: ProcessGroupX does not support all_reduce"]
    made, _ = bench(RuntimeError("connection reset by peer"))
    with pytest.raises(RuntimeError, match="reset by peer"):
        made.run()


def test_a_wrong_result_of_one_rank_is_reported(bench) -> None:
    made, notes = bench()
    others = Timing(4096, (1e-3,), right=False)
    made.group.gather = lambda own: [own, others] if isinstance(own, Timing) else [own]
    assert not any(s.correct for s in made.run())
    assert notes.records and not any(r["correct"] for r in notes.records)


def test_a_wrong_result_fails_the_run_and_is_kept(tmp_path: Path) -> None:
    paths, said = RunPaths(tmp_path), Notes()
    wrong = comm.sample("broadcast", "all", 2, 1, 8, [1.0], False)
    with pytest.raises(RuntimeError, match="wrong result: broadcast of 8 bytes"):
        collectives.write([wrong], {}, said, paths, rank=0)
    assert comm.read_csv(paths.comm_csv) == [wrong]
    assert said.records == [] and not paths.outcome(0).exists()


def test_memory_bounds_the_sizes_and_the_reason_is_said(bench) -> None:
    made, notes = bench(free=2**30)
    assert made.sizes()[-1] == 64 * 2**20  # of 128 MiB that fit, by factors of 4 from 1 KiB
    (text,) = notes.warnings
    assert "end before 1 GiB: 4 buffers must fit in half of the 1 GiB that rank 0 has free" in text
    assert "128 MiB is the most" in text
    made, _ = bench(free=2**30, max_bytes=2**28)
    with pytest.raises(UsageError, match="--max-bytes 256 MiB is too much: 4 buffers"):
        made.run()
    made, notes = bench(max_bytes=2**33)
    assert made.sizes()[-1] == 2**32 and not notes.warnings


def test_pairs_are_of_a_node_and_of_two_nodes(bench) -> None:
    made, notes = bench()
    for world, nodes, expected in (
        (4, 2, {"intra_node": (0, 1), "inter_node": (0, 2)}),
        (2, 2, {"inter_node": (0, 1)}),
        (2, 1, {"intra_node": (0, 1)}),
    ):
        one = Bench(Alone(world, nodes), made.request, notes)
        assert {k: t.members for k, t in one.teams("sendrecv")} == expected
        assert {k: t.size for k, t in one.teams("broadcast")} == {"all": world}
