"""Nine kinds of training programs in studies on Slurm, each to results.csv and its report.

Each is run by srun and by torchrun.
"""

import csv
import importlib.util
import re
import sys
import time
from collections.abc import Callable

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.analysis.figures.draw import draw
from jobkit.analysis.report.report import write_report
from jobkit.outcome.status import run_state
from jobkit.paths import RunPaths, read_json
from support import needs
from support.checkout import Checkout, make_checkout
from support.training_programs import PROGRAMS

STUDIES = {
    "unchanged": 'command = ["{python}", "train_plain.py"]\ngpus = [1, 2, "2x2"]',
    "libraries": """
command = ["{python}", "train_{{kind}}.py"]
gpus = ["2x1"]
[parameters]
kind = "lightning"
[sweep]
kind = ["lightning", "transformers", "accelerate"]
""",
    "torchrun": """
command = ["{python}", "train_{{kind}}.py"]
launcher = "torchrun"
gpus = [1]
[parameters]
kind = "lightning"
[sweep]
kind = ["lightning", "transformers", "accelerate"]
""",
    "agents": """
command = ["{python}", "train_{{kind}}.py"]
launcher = "torchrun"
gpus = ["2x1"]
[parameters]
kind = "metered"
[sweep]
kind = ["metered", "crashes", "stopped"]
""",
    "prints": """
command = ["{python}", "train_prints.py"]
gpus = [1, 2, "2x2"]
pattern = "nanogpt"
auto = false
[work]
unit = "tokens"
per_step = 1000
scaling = "strong"
""",
    "quiet": """
command = ["{python}", "train_{{kind}}.py"]
gpus = [1, "2x1"]
[parameters]
kind = "silent"
[sweep]
kind = ["silent", "crashes"]
""",
    "stopped": 'command = ["{python}", "train_stopped.py"]\ngpus = [1]\nrepeats = 2',
}
LIBRARIES = ("lightning", "transformers", "accelerate")
TRAIN = ("unchanged", "libraries", "torchrun")  # with torch


@pytest.fixture(scope="module")
def kit(tmp_path_factory) -> Checkout:
    folder = tmp_path_factory.mktemp("programs")
    made = make_checkout(folder / "kit", folder / "data")
    for name, text in PROGRAMS.items():
        (made.folder / f"train_{name}.py").write_text(text)
    return made


@pytest.fixture(scope="module")
def studies(cluster, kit: Checkout) -> dict[str, list[str]]:
    """All studies at once, by name: their jobs; one of them is collected by a job of its own."""
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            needs.unavailable(
                f"{library} is not installed (make venv, or pip install '.[adapters]')"
            )
    started = {}
    for name, text in STUDIES.items():
        file = kit.folder / f"{name}.toml"
        file.write_text(f'name = "{name}"\n' + text.format(python=sys.executable))
        argv = [sys.executable, "run_benchmarks.py", "--study", str(file), "--no-wait"]
        # Ranks of several runs at once would wait for cores, some beyond their time to start.
        argv += ["--max-running", "1"] if name in TRAIN else []
        argv += [] if name == "unchanged" else ["--no-collect"]
        env = {**kit.env, "PYTHONPATH": str(kit.folder), "OMP_NUM_THREADS": "1"}
        done = cluster.run(*argv, cwd=kit.folder, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        started[name] = re.findall(r"\d+", re.search(r"started: Slurm (.*)", done.stdout)[1])
    return started


def until(condition: Callable[[], object], timeout: float = 2400) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def collected(
    cluster, kit: Checkout, studies: dict[str, list[str]], name: str
) -> list[dict[str, str]]:
    """The rows of a study, by kind and size; the report is there."""
    cluster.wait_all(studies[name], 900)
    folder = kit.folder / "logs" / name
    if not (folder / ".collect-job.json").exists():  # here, where pandas is imported only once
        results = collect(str(folder))
        write_report(results, draw(results).paths if name == "agents" else [])
    assert (folder / "report.html").exists(), (folder / "collect.log").read_text()
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    return sorted(rows, key=lambda r: (r["series"], int(r["world_size"]), int(r["repeat"])))


def found(rows: list[dict[str, str]], *columns: str) -> set[tuple[str, ...]]:
    return {tuple(row[column] for column in columns) for row in rows}


def test_a_stopped_element_of_an_array_goes_on_and_the_other_is_left_alone(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    """The last element first: its job id is that of the whole array."""
    folders = (kit.folder / "logs" / "stopped").glob("*/spec.json")
    runs = [RunPaths(path.parent) for path in sorted(folders)]
    ids = {str(read_json(paths.submission)["job_id"]): paths for paths in runs}
    for job_id in sorted(ids, reverse=True):
        paths = ids[job_id]
        until(lambda paths=paths: (paths.folder / "ready-0").exists())
        assert all(p.attempt_numbers() == [0] for p in runs if not p.outcome(0).exists())
        cluster.run("scancel", "--signal=USR2", job_id)
        until(lambda paths=paths: run_state(paths).status == "ok")
    rows = collected(cluster, kit, studies, "stopped")
    assert found(rows, "status", "attempts", "throughput_source") == {("ok", "2", "meter")}
    for paths in runs:
        assert [read_json(paths.outcome(n))["status"] for n in (0, 1)] == ["preempted", "ok"]


def test_torchruns_agents_on_two_nodes_hand_the_stop_signal_on(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    """Others beside it end, or crash on one rank; all come into a true report with figures."""
    folder = kit.folder / "logs" / "agents"
    (paths,) = [
        RunPaths(p.parent) for p in folder.glob("*/spec.json") if "train_stopped" in p.read_text()
    ]
    until(lambda: all((paths.folder / f"ready-{rank}").exists() for rank in (0, 1)))
    cluster.run("scancel", "--signal=USR2", str(read_json(paths.submission)["job_id"]))
    until(lambda: run_state(paths).status == "ok")
    assert read_json(paths.outcome(0))["exit_code"] == 75
    assert {(paths.folder / f"kept-{rank}").exists() for rank in (0, 1)} == {True}
    rows = collected(cluster, kit, studies, "agents")
    assert found(rows, "kind", "status", "attempts", "reason") == {
        ("crashes", "failed", "1", "rank 1: exit code 3"),
        ("metered", "ok", "1", ""),
        ("stopped", "ok", "2", ""),
    }
    assert {r["kind"]: bool(r["time_per_epoch_s"]) for r in rows if r["throughput"]} == {
        "metered": True, "stopped": False,
    }  # fmt: skip
    assert found(rows, "nodes", "world_size") == {("2", "2")}
    assert 'class="verdict"' in (folder / "report.html").read_text()


def test_a_loop_without_a_change_is_measured_at_each_size(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    rows = collected(cluster, kit, studies, "unchanged")
    assert found(rows, "nodes", "world_size", "status", "throughput_source") == {
        ("1", "1", "ok", "auto"), ("1", "2", "ok", "auto"), ("2", "4", "ok", "auto"),
    }  # fmt: skip
    assert found(rows, "throughput_unit") == {("samples/s",)}


@pytest.mark.parametrize("name", TRAIN[1:])
def test_three_libraries_as_they_are(
    cluster, kit: Checkout, studies: dict[str, list[str]], name: str
) -> None:
    """By srun on two nodes, and by torchrun."""
    rows = collected(cluster, kit, studies, name)
    assert {(r["status"], r["throughput_unit"]) for r in rows} == {("ok", "samples/s")}
    sources = {row["series"].split("kind=")[1]: row["throughput_source"] for row in rows}
    assert sources == dict.fromkeys(LIBRARIES, "auto") and len(rows) == len(sources)
    report = (kit.folder / "logs" / name / "report.html").read_text()
    assert "images" not in report.replace("data:image", "")


def test_its_own_line_is_read_by_a_pattern(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    rows = collected(cluster, kit, studies, "prints")
    assert [float(row["throughput"]) for row in rows] == pytest.approx([1e4, 2e4, 4e4])
    assert found(rows, "status", "throughput_source") == {("ok", "pattern nanogpt")}
    report = (kit.folder / "logs" / "prints" / "report.html").read_text()
    assert "40,000 tokens per second" in report


def test_of_one_that_prints_nothing_the_wall_time_counts_and_a_crash_is_told(
    cluster, kit: Checkout, studies: dict[str, list[str]]
) -> None:
    rows = collected(cluster, kit, studies, "quiet")
    silent = [row for row in rows if row["series"].endswith("kind=silent")]
    crashed = [row for row in rows if row["series"].endswith("kind=crashes")]
    wall = "wall time of the run, start-up included"
    assert found(silent, "world_size", "status", "throughput_source") == {
        ("1", "ok", wall), ("2", "ok", wall),
    }  # fmt: skip
    assert found(crashed, "world_size", "status", "reason") == {
        ("1", "ok", ""), ("2", "failed", "rank 1: exit code 3"),
    }  # fmt: skip
    report = (kit.folder / "logs" / "quiet" / "report.html").read_text()
    assert "start-up included" in report and "rank 1: exit code 3" in report
