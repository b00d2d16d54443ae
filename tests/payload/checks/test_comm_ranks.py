"""The communication benchmark with real ranks: every operation, its check, the files it leaves."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from jobkit.checks import collectives
from jobkit.checks import comm as cli
from jobkit.checks.collectives import Exchange, sizes_that_fit, teams
from jobkit.metric import comm
from jobkit.paths import RunPaths, read_json
from jobkit.payload.place import RankEnv
from ranks import on_ranks
from support.records import records_of
from support.refusals import error_of
from support.rigs import environment

SIZE = 5000  # neither a multiple of a rank's part nor of the pattern


def be_rank(rank: int, world: int) -> dict[str, list[object]]:
    found = {}
    for name in operations(world):
        made = Exchange(name, SIZE, range(world), rank, torch.device("cpu"))
        made.prepare()
        before = made.is_right()
        times, right = made.measure()
        made.is_right = lambda: rank != 1  # one rank's result is wrong
        found[name] = [before, right, made.measure()[1], made.bytes, len(times)]
    return found


def operations(world: int) -> list[str]:
    return [name for name in comm.OPERATIONS if name != "sendrecv" or world == 2]


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_is_right_and_would_be_seen_wrong(fork_server, world) -> None:
    told = on_ranks(be_rank, world, world=world, limit_s=600)
    for name in operations(world):
        before, right, with_fault, sizes, counts = zip(*(one[name] for one in told), strict=True)
        assert all(right) and not any(with_fault), name
        # What lies there before it ran is wrong on every rank; the sender of a broadcast has it.
        assert before == (name == "broadcast", *[False] * (world - 1)), name
        assert set(sizes) == {SIZE // 4 // world * world * 4} and all(
            3 <= count <= 20 for count in counts
        )


def test_a_run_leaves_records_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execvp", execvp := Mock(side_effect=SystemExit))
    paths = RunPaths(tmp_path / "my comm")
    with pytest.raises(SystemExit):
        cli.main(["--nproc-per-node", "2", "--max-bytes", "16K", "--run-dir", str(paths.folder)])
    done = subprocess.run(
        execvp.call_args.args[1], env=environment(OMP_NUM_THREADS="1"), capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = comm.read_csv(paths.comm_csv)
    assert [(s.operation, s.bytes) for s in found] == [
        (name, size) for name in comm.OPERATIONS for size in (1024, 4096, 16384)
    ]
    assert all(s.correct and s.ranks == 2 and s.nodes == 1 for s in found)
    assert all(0 < s.time_low_s <= s.time_s <= s.time_high_s for s in found)
    assert {s.scope for s in found if s.operation == "sendrecv"} == {"intra_node"}
    records = records_of(paths.metrics(0))
    assert [r["time_s"] for r in records if r["kind"] == "comm"] == [s.time_s for s in found]
    (start,) = [r for r in records if r["kind"] == "run_start"]
    assert (start["backend"], start["world_size"]) == ("gloo", 2)
    assert records[-1]["kind"] == "run_end" and records[-1]["status"] == "ok"
    assert (read_json(paths.outcome(0)) or {})["status"] == "ok"
    assert done.stdout.count("[METRIC]") == len(records)


def test_iterations_fit_in_a_second_but_three_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "largest", lambda self, values: values)
    monkeypatch.setattr(Exchange, "is_right", lambda self: True)
    for seconds, count in ((1e-3, 20), (0.1, 10), (2.0, 3)):
        monkeypatch.setattr(Exchange, "timed", lambda self, n, s=seconds: [s] * n)
        made = Exchange("all_reduce", 8, (0, 1), 0, torch.device("cpu"))
        assert made.measure() == ([seconds] * count, True)


def test_a_wrong_result_fails_the_run_and_is_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    wrong = comm.sample("broadcast", "all", 2, 1, 8, [1.0], False)
    with pytest.raises(RuntimeError, match="wrong result: broadcast of 8 bytes"):
        collectives.write([wrong], {}, Mock(), paths, rank=0)
    assert comm.read_csv(paths.comm_csv) == [wrong] and not paths.outcome(0).exists()


def test_an_operation_that_the_backend_lacks_is_left_out(monkeypatch) -> None:
    says = "Backend gloo does not support alltoall_base"
    monkeypatch.setattr(Exchange, "largest", lambda self, values: values)
    monkeypatch.setattr(Exchange, "run", Mock(side_effect=RuntimeError(says)))
    place, report = RankEnv(world_size=2, local_world_size=2), Mock()
    alone = SimpleNamespace(place=place, device=torch.device("cpu"), gather=lambda value: [value])
    args = SimpleNamespace(ops=["all_to_all"], min_bytes=1024, max_bytes=None)
    with pytest.raises(RuntimeError, match="no operation is available"):
        collectives.measure_all(alone, report, args)
    report.warn.assert_called_once_with(f"all_to_all is not available: {says}")
    monkeypatch.setattr(Exchange, "run", Mock(side_effect=RuntimeError("closed by peer")))
    with pytest.raises(RuntimeError, match="closed by peer"):
        collectives.measure_all(alone, report, args)


def test_memory_bounds_the_sizes_and_the_reason_is_said() -> None:
    sizes, why = sizes_that_fit(1024, None, [2**31, 2**30])
    assert sizes[:2] == [1024, 4096]
    assert sizes[-1] == 64 * 2**20  # of 128 MiB that fit, by factors of 4 from 1 KiB
    assert "end before 1 GiB: 4 buffers must fit in half of the 1 GiB that rank 1 has free" in why
    assert "128 MiB is the most" in why
    said = error_of(sizes_that_fit, 1024, 2**28, [2**30])
    assert "--max-bytes 256 MiB is too much: 4 buffers" in said
    sizes, why = sizes_that_fit(1024, 2**33, [2**40])
    assert sizes[-1] == 2**32 and not why


def test_pairs_are_of_a_node_and_of_two_nodes() -> None:
    for world, nodes, pairs in (
        (4, 2, {"intra_node": [0, 1], "inter_node": [0, 2]}),
        (2, 2, {"inter_node": [0, 1]}),
        (2, 1, {"intra_node": [0, 1]}),
    ):
        place = RankEnv(world_size=world, local_world_size=world // nodes)
        assert teams("sendrecv", place) == pairs
        assert teams("broadcast", place) == {"all": list(range(world))}
