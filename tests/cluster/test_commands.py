"""Any program on Slurm, without torch: its ranks' places, and crashes, stops, limits, restarts."""

import json
import re
import sys

import pytest

from jobkit.outcome.state import run_state
from jobkit.paths import RunPaths, read_json
from support.checkout import Checkout
from support.place import until

PROGRAM = '''
"""Says where each rank is, crashes, counts until it is stopped, takes memory, or waits."""
import json, os, pathlib, signal, sys, time

what, folder = sys.argv[1], pathlib.Path(os.environ["JOBKIT_RUN_DIR"])
rank, attempt = int(os.environ.get("RANK", 0)), os.environ["JOBKIT_ATTEMPT"]
stopped = []
signal.signal(signal.SIGUSR2, lambda *_: stopped.append(1))
(folder / f"ready-{attempt}-{rank}").touch()
if what == "place":
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT HOSTILE"
    own = {name: os.environ.get(name) for name in names.split()}
    own |= {"argv": sys.argv[2:], "node": os.environ.get("SLURMD_NODENAME")}
    (folder / f"place-{rank}.json").write_text(json.dumps(own))
elif what == "crash" and attempt in sys.argv[2]:
    sys.exit(3) if rank == 1 else time.sleep(300)
elif what == "memory":
    taken = bytearray(400 << 20)
    time.sleep(300)
elif what == "wait" and attempt == "0":
    until = time.monotonic() + 900
    while time.monotonic() < until:
        time.sleep(1)
elif what == "count":
    kept = folder / f"kept-{rank}"
    begun = int(kept.read_text()) if kept.exists() else 0
    while begun == 0 and not stopped:
        time.sleep(0.05)
    if stopped:
        time.sleep(rank)  # a rank that ends first leaves the others their time
        kept.write_text("7")
        sys.exit(75)
'''
WORDS = ["a b", "$HOME", "it's", 'say "hi"', "two\nlines", "", "*"]
HOSTILE = "a,b 'single' \"double\" $HOME `date` \\ \n second line"
STUDIES: dict[str, tuple[list[str], list[str]]] = {  # options, and words of the program
    "preempted": (["--gpus", "1", "--exclusive"], ["wait"]),
    "limit": (["--gpus", "1", "--time", "1"], ["wait"]),
    "srun": (["--gpus", "1", "2", "2x2"], ["place", *WORDS]),
    "torchrun": (["--gpus", "2x2", "--launcher=torchrun"], ["place", *WORDS]),
    "count": (["--gpus", "2x1"], ["count"]),
    "array": (["--gpus", "1", "--repeats", "2"], ["count"]),
    "sweep": (["--gpus", "1", "--repeats", "2", "--within-allocation"], ["count"]),
    "crash": (["--gpus", "2x1", "--max-restarts=1"], ["crash", "012"]),
    "memory": (["--gpus", "1", "--mem", "150M"], ["memory"]),
    "within": (["--gpus", "2", "2x1", "--within-allocation", "--max-restarts=1"], ["crash", "0"]),
}


@pytest.fixture(scope="module")
def jobs(cluster, kit: Checkout) -> dict[str, list[str]]:
    (kit.folder / "program.py").write_text(PROGRAM)
    program = ["--no-auto", "--", sys.executable, "program.py"]
    made = {
        name: kit.start(cluster, name, *options, *program, *words, HOSTILE=HOSTILE)
        for name, (options, words) in STUDIES.items()
    }
    step = ["srun", "--nodes={nodes}", "--ntasks={ranks}", "sh", "-c", "echo on $SLURMD_NODENAME"]
    made["once"] = kit.start(cluster, "once", "--gpus", "2x2", "--launcher=once", "--", *step)
    strike(cluster, kit)
    return made


def strike(cluster, kit: Checkout) -> None:
    """Do to the runs what comes from outside; a requeued job waits ten seconds and more."""
    preempted, count = (the_run(kit, name) for name in ("preempted", "count"))
    until((preempted.folder / "ready-0-0").exists, "the start of the run that is preempted")
    node = cluster.running(job_of(preempted))["NodeList"]
    urgent = ["--partition=urgent", f"--nodelist={node}", "--exclusive", "--wrap", "true"]
    assert cluster.wait(cluster.submit(*urgent)) == ("COMPLETED", "0:0")
    until(lambda: len(list(count.folder.glob("ready-0-*"))) == 2, "both ranks")
    cluster.run("scancel", "--signal=USR2", job_of(count))  # Slurm's warning, to the steps only
    # The last element: its job id is that of the whole array.
    _, last = sorted(kit.runs("array"), key=job_of)
    until(lambda: len([*last.folder.parent.glob("*/ready-0-0")]) == 2, "both elements")
    cluster.run("scancel", "--signal=USR2", job_of(last))


def ended(cluster, jobs: dict[str, list[str]], name: str) -> set[tuple[str, str]]:
    return {cluster.wait(job_id) for job_id in jobs[name]}


def the_run(kit: Checkout, name: str) -> RunPaths:
    (paths,) = kit.runs(name)
    return paths


def job_of(paths: RunPaths) -> str:
    return str(read_json(paths.submission)["job_id"])


def places_of(paths: RunPaths) -> list[dict]:
    """What each rank said of its place, in the order of ranks."""
    places = [json.loads(path.read_text()) for path in paths.folder.glob("place-*.json")]
    return sorted(places, key=lambda place: int(place["RANK"]))


def statuses(paths: RunPaths) -> list[str]:
    return [read_json(paths.outcome(n))["status"] for n in paths.attempt_numbers()]


@pytest.mark.parametrize(
    ("launcher", "sizes"), [("srun", {(1, 1), (1, 2), (2, 2)}), ("torchrun", {(2, 2)})]
)
def test_each_rank_has_its_place_and_the_whole_command(cluster, kit, jobs, launcher, sizes) -> None:
    assert ended(cluster, jobs, launcher) == {("COMPLETED", "0:0")}
    seen = set()
    for paths in kit.runs(launcher):
        assert run_state(paths).status == "ok", paths.log.read_text()
        spec, places = read_json(paths.spec)["spec"], places_of(paths)
        nodes, per_node = spec["nodes"], spec["ranks_per_node"]
        for rank, place in enumerate(places):
            assert (place["argv"], place["HOSTILE"]) == (WORDS, HOSTILE)
            sizes_of = [rank, nodes * per_node, per_node, rank % per_node, rank // per_node]
            names = "RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_RANK NODE_RANK"
            assert [int(place[name]) for name in names.split()] == sizes_of
        assert len(places) == nodes * per_node
        assert len({(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in places}) == 1
        assert len({(p["NODE_RANK"], p["node"]) for p in places}) == nodes
        seen.add((nodes, per_node))
    assert seen == sizes


@pytest.mark.parametrize(
    ("name", "job", "attempts"),
    [
        ("crash", ("FAILED", "3:0"), ["failed", "failed"]),
        ("within", ("COMPLETED", "0:0"), ["failed", "ok"]),
        ("count", ("COMPLETED", "0:0"), ["preempted", "ok"]),
    ],
)
def test_attempts_and_the_job_end_as_they_must(cluster, kit, jobs, name, job, attempts) -> None:
    """A rank that crashes, and the others with it; two runs in one allocation; the stop signal."""
    assert ended(cluster, jobs, name) == {job}
    runs = kit.runs(name)
    assert len({job_of(paths) for paths in runs}) == 1
    for paths in runs:
        assert statuses(paths) == attempts, paths.log.read_text()
    if name == "crash":
        assert run_state(paths).reason == "rank 1: exit code 3"
    if name == "count":
        assert {path.read_text() for path in paths.folder.glob("kept-*")} == {"7"}
        assert "requeueing job" in paths.log.read_text()


def test_an_allocation_goes_on_after_a_requeue_with_what_is_left(cluster, kit, jobs) -> None:
    """Each of the two runs is stopped once; the first one is ok as the second one is stopped."""
    runs = (kit.folder / "logs" / "sweep").glob
    for count in (1, 2):
        until(lambda n=count: len([*runs("*/ready-0-0")]) == n, f"run {count}")
        cluster.run("scancel", "--signal=USR2", jobs["sweep"][0])
    assert ended(cluster, jobs, "sweep") == {("COMPLETED", "0:0")}
    assert [statuses(paths) for paths in kit.runs("sweep")] == [["preempted", "ok"]] * 2
    assert cluster.show(jobs["sweep"][0])[0]["Restarts"] == "2"


def test_a_command_may_bring_its_own_launcher(cluster, kit: Checkout, jobs) -> None:
    ended(cluster, jobs, "once")
    text = the_run(kit, "once").log.read_text()
    assert run_state(the_run(kit, "once")).status == "ok", text
    nodes = re.findall(r"^on (\w+)$", text, re.MULTILINE)
    assert len(nodes) == 4 and {nodes.count(node) for node in nodes} == {2}, text


def test_a_job_over_its_memory_is_oom_with_the_line_that_says_so(cluster, kit, jobs) -> None:
    ended(cluster, jobs, "memory")
    said = kit.python(cluster, "-m", "jobkit", "status", "memory", "--json").stdout
    (row,) = json.loads(said)["runs"]
    assert row["status"] == "oom" and "exceeded memory limit" in str(row), row


def test_a_run_that_is_preempted_is_requeued_and_goes_on(cluster, kit: Checkout, jobs) -> None:
    assert ended(cluster, jobs, "preempted") == {("COMPLETED", "0:0")}
    paths = the_run(kit, "preempted")
    assert run_state(paths).status == "ok" and paths.attempt_numbers() == [0, 1]
    assert cluster.show(job_of(paths))[0]["Restarts"] == "1"


def test_a_stopped_element_of_an_array_goes_on_alone(cluster, kit, jobs) -> None:
    first, last = sorted(kit.runs("array"), key=job_of)
    until(lambda: run_state(last).status == "ok", "its second attempt")
    assert first.attempt_numbers() == [0] and not first.outcome(0).exists()
    cluster.run("scancel", "--signal=USR2", job_of(first))
    assert ended(cluster, jobs, "array") == {("COMPLETED", "0:0")}
    assert [statuses(paths) for paths in (first, last)] == [["preempted", "ok"]] * 2


def test_a_job_over_its_time_limit_is_a_timeout(cluster, kit: Checkout, jobs) -> None:
    assert {state for state, _ in ended(cluster, jobs, "limit")} == {"TIMEOUT"}
    assert set(kit.statuses(cluster, "limit").values()) == {"timeout"}
