"""Any program in a study on Slurm: its ranks' places, and crashes, stops and restarts of it."""

import json
import re
import sys
import time
from collections.abc import Callable

import pytest

from jobkit.outcome.status import run_state
from jobkit.paths import RunPaths, read_json
from support.checkout import Checkout, make_checkout

PROGRAM = '''
"""Says where each rank is, adds up the ranks, crashes, or counts until it is stopped."""
import json, os, pathlib, signal, sys, time

what, folder = sys.argv[1], pathlib.Path(os.environ["JOBKIT_RUN_DIR"])
rank, attempt = int(os.environ.get("RANK", 0)), os.environ["JOBKIT_ATTEMPT"]
stopped = []
signal.signal(signal.SIGUSR2, lambda *_: stopped.append(1))
if what == "place":
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT".split()
    own = {name: os.environ.get(name) for name in names}
    own |= {"argv": sys.argv[2:], "node": os.environ.get("SLURMD_NODENAME")}
    (folder / f"place-{rank}.json").write_text(json.dumps(own))
elif what == "sum":
    import torch.distributed as dist, torch
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    (folder / f"sum-{rank}").write_text(str(total.item()))
    dist.destroy_process_group()
    os._exit(0)  # torch aborts now and then while the interpreter is finalised
elif what == "crash" and rank == 1 and attempt in sys.argv[2]:
    sys.exit(3)
elif what == "crash" and attempt in sys.argv[2]:
    time.sleep(300)
elif what == "count":
    kept = folder / f"kept-{rank}"
    begun = int(kept.read_text()) if kept.exists() else 0
    (folder / f"ready-{attempt}-{rank}").touch()
    while begun == 0 and not stopped:
        time.sleep(0.05)
    if stopped:
        time.sleep(rank)  # a rank that ends first leaves the others their time
        kept.write_text("7")
        sys.exit(75)
'''
WORDS = ["place", "a b", "$HOME", "it's", 'say "hi"', "two\nlines", "", "*"]
SIZES = {(1, 1), (1, 2), (2, 2)}


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Checkout:
    folder = tmp_path_factory.mktemp("commands")
    made = make_checkout(folder / "my kit", folder / "data")
    (made.folder / "program.py").write_text(PROGRAM)
    return made


def start(cluster, kit: Checkout, name: str, *words: str, command: list[str]) -> list[str]:
    """Submit a study of the command, which nobody collects; return the ids of its jobs."""
    own = {**kit.env, "PYTHONPATH": str(kit.folder)}
    asked = ["--name", name, "--no-wait", "--no-collect", *words, "--", *command]
    argv = [sys.executable, "run_benchmarks.py", *asked]
    done = cluster.run(*argv, cwd=kit.folder, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"\d+", re.search(r"started: Slurm jobs? (.*)", done.stdout)[1])


@pytest.fixture(scope="module")
def studies(cluster, kit: Checkout) -> dict[str, list[str]]:
    """All studies of these tests at once, by name: their jobs."""
    program = [sys.executable, "program.py"]
    sizes = ["--gpus", "1", "2", "2x2"]
    return {
        "srun": start(cluster, kit, "srun", *sizes, command=[*program, *WORDS]),
        "torchrun": start(
            cluster, kit, "torchrun", *sizes, "--launcher=torchrun", command=[*program, *WORDS]
        ),
        "sum": start(
            cluster, kit, "sum", "--gpus", "2x1", "--launcher=torchrun", command=[*program, "sum"]
        ),
        "count": start(cluster, kit, "count", "--gpus", "2x1", command=[*program, "count"]),
        "again": start(
            cluster, kit, "again", "--gpus", "2", "--max-restarts=1",
            command=[*program, "crash", "0"],
        ),
        "crash": start(
            cluster, kit, "crash", "--gpus", "2x1", "--max-restarts=1",
            command=[*program, "crash", "012"],
        ),
        "within": start(
            cluster, kit, "within", "--gpus", "2", "2x1", "--within-allocation",
            "--max-restarts=1", command=[*program, "crash", "0"],
        ),
        "once": start(
            cluster, kit, "once", "--gpus", "2x2", "--launcher=once",
            command=["srun", "--nodes={nodes}", "--ntasks={ranks}", "bash", "-c",
                     "echo on $SLURMD_NODENAME"],
        ),
        "absent": start(cluster, kit, "absent", "--gpus", "2", command=["no such program"]),
    }  # fmt: skip


def until(condition: Callable[[], object], timeout: float = 720) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def runs(kit: Checkout, name: str) -> list[RunPaths]:
    folder = kit.folder / "logs" / name
    return [RunPaths(path.parent) for path in sorted(folder.glob("*/spec.json"))]


def the_run(cluster, kit: Checkout, studies: dict[str, list[str]], name: str) -> RunPaths:
    """The one run of a study, once all of it has ended."""
    cluster.wait_all(studies[name])
    (paths,) = runs(kit, name)
    return paths


def test_all_in_one_allocation_with_a_crash_in_it(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    assert cluster.wait_all(studies["within"]) == {("COMPLETED", "0:0")}
    found = {p.folder.name: (run_state(p).status, p.attempt_numbers()) for p in runs(kit, "within")}
    assert list(found.values()) == [("ok", [0, 1])] * 2
    assert len({read_json(p.submission)["job_id"] for p in runs(kit, "within")}) == 1


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_each_rank_has_its_place_and_the_whole_command(
    cluster, kit: Checkout, studies: dict[str, list[str]], launcher: str
) -> None:
    assert cluster.wait_all(studies[launcher]) == {("COMPLETED", "0:0")}
    sizes = set()
    for paths in runs(kit, launcher):
        assert run_state(paths).status == "ok", paths.log.read_text()
        spec = read_json(paths.spec)["spec"]
        nodes, per_node = spec["nodes"], spec["ranks_per_node"]
        found = sorted(
            (json.loads(p.read_text()) for p in paths.folder.glob("place-*.json")),
            key=lambda place: int(place["RANK"]),
        )
        for rank, place in enumerate(found):
            assert place["argv"] == WORDS[1:]
            assert int(place["RANK"]) == rank
            assert int(place["WORLD_SIZE"]) == nodes * per_node == len(found)
            assert int(place["LOCAL_WORLD_SIZE"]) == per_node
            assert int(place["LOCAL_RANK"]) == rank % per_node
            assert int(place["NODE_RANK"]) == rank // per_node
        assert len({(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in found}) == 1
        assert len({(p["NODE_RANK"], p["node"]) for p in found}) == nodes
        sizes.add((nodes, per_node))
    assert sizes == SIZES


def test_torch_meets_at_the_address_that_the_ranks_were_given(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    paths = the_run(cluster, kit, studies, "sum")
    assert run_state(paths).status == "ok", paths.log.read_text()
    assert [p.read_text() for p in paths.folder.glob("sum-*")] == ["1.0"] * 2


def test_a_crash_of_one_rank_is_started_again_as_often_as_was_said(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    again = the_run(cluster, kit, studies, "again")
    assert run_state(again).status == "ok" and again.attempt_numbers() == [0, 1]
    crash = the_run(cluster, kit, studies, "crash")
    state = run_state(crash)
    assert (state.status, state.reason) == ("failed", "rank 1: exit code 3")
    assert (state.attempts, state.exit_code) == (2, 3)


def test_a_stopped_command_is_requeued_and_goes_on(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    """Slurm's own warning, to the steps of the job only."""
    (paths,) = runs(kit, "count")
    job_id = read_json(paths.submission)["job_id"]
    ready = [paths.folder / f"ready-0-{rank}" for rank in (0, 1)]
    cluster.wait_for(job_id, JobState="RUNNING")
    until(lambda: all(path.exists() for path in ready))
    cluster.run("scancel", "--signal=USR2", job_id)
    assert cluster.wait_all(studies["count"]) == {("COMPLETED", "0:0")}
    outcomes = [read_json(paths.outcome(n)) for n in (0, 1)]
    assert [o["status"] for o in outcomes] == ["preempted", "ok"], paths.log.read_text()
    assert {p.read_text() for p in paths.folder.glob("kept-*")} == {"7"}
    assert "requeueing job" in paths.log.read_text()


def test_a_command_may_bring_its_own_launcher(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    paths = the_run(cluster, kit, studies, "once")
    text = paths.log.read_text()
    assert run_state(paths).status == "ok", text
    nodes = re.findall(r"^on (\w+)$", text, re.MULTILINE)
    assert len(nodes) == 4 and {nodes.count(node) for node in nodes} == {2}, text


def test_a_command_that_a_node_does_not_have_is_one_line(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    paths = the_run(cluster, kit, studies, "absent")
    state = run_state(paths)
    assert state.status == "failed" and state.exit_code == 127
    assert re.fullmatch(r"rank [01]: no command no\\ such\\ program on \S+", state.reason)
    assert paths.log.read_text().count("jobkit: error: no command") == 1


def test_one_job_of_a_command(cluster, kit: Checkout) -> None:
    """`sbatch run.sh -- ...`, with a folder of its own."""
    words = ["--ntasks-per-node=2", "run.sh", "--", sys.executable, "program.py", "place", "x"]
    job_id = kit.sbatch(cluster, *words)
    assert cluster.wait(job_id, 480) == ("COMPLETED", "0:0"), kit.log(job_id)
    paths = RunPaths(kit.folder / "logs" / "single" / f"job-{job_id}")
    assert read_json(paths.outcome(0))["status"] == "ok"
    spec = read_json(paths.spec)["spec"]
    assert (spec["command"], spec["ranks_per_node"]) == ([*words[3:]], 2)
    assert len(list(paths.folder.glob("place-*.json"))) == 2
