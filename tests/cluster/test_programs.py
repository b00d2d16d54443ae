"""Programs of others in studies on Slurm, each to results.csv and its report.

Without torch: one with the meter, one that says nothing. Long: unchanged loops of
torch, Lightning, transformers and Accelerate.
"""

import importlib.util
import sys

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.analysis.report.report import write_report
from support import needs
from support.checkout import Checkout
from support.records import rows_of
from support.training_programs import PROGRAMS

UNCHANGED = ("plain", "lightning", "transformers", "accelerate")
HEADS = {
    "quiet": 'gpus = [1, "2x1"]\n[parameters]\nkind = "silent"\n[sweep]\n'
    'kind = ["silent", "crashes", "counts"]',
    "unchanged": 'gpus = ["2x1"]\n[parameters]\nkind = "plain"\n[sweep]\n'
    f"kind = [{', '.join(map(repr, UNCHANGED))}]",
}
COUNTS = """
import os, time
from jobkit import meter
meter.start(unit="samples")
for step in range(40):
    time.sleep(0.02)
    meter.step(work=8 / int(os.environ["WORLD_SIZE"]))
meter.epoch(0)
meter.end()
"""


def started(cluster, kit: Checkout, name: str, *words: str) -> list[str]:
    for kind, text in (*PROGRAMS.items(), ("counts", COUNTS)):
        (kit.folder / f"train_{kind}.py").write_text(text)
    head = f'name = "{name}"\ncommand = ["{sys.executable}", "train_{{kind}}.py"]\n'
    file = kit.folder / f"{name}.toml"
    file.write_text(head + HEADS[name] + "\n")
    return kit.start(cluster, name, "--study", str(file), *words, OMP_NUM_THREADS="1")


def collected(cluster, kit: Checkout, name: str, jobs: list[str]) -> list[dict[str, str]]:
    for job_id in jobs:
        cluster.wait(job_id)
    folder = kit.folder / "logs" / name
    write_report(collect(str(folder)), [])
    order = lambda row: (row["series"], int(row["world_size"]))  # noqa: E731
    return sorted(rows_of(folder / "results.csv"), key=order)


def test_a_meter_is_read_else_the_wall_time_counts_and_a_crash_is_told(cluster, kit) -> None:
    found = {}
    for row in collected(cluster, kit, "quiet", started(cluster, kit, "quiet")):
        what = row["throughput_source"] if row["status"] == "ok" else row["reason"]
        found.setdefault(row["kind"], []).append((row["world_size"], row["status"], what))
    wall = "wall time of the run, start-up included"
    assert found == {
        "silent": [("1", "ok", wall), ("2", "ok", wall)],
        "crashes": [("1", "ok", wall), ("2", "failed", "rank 1: exit code 3")],
        "counts": [("1", "ok", "meter"), ("2", "ok", "meter")],
    }
    report = (kit.folder / "logs" / "quiet" / "report.html").read_text()
    assert "start-up included" in report and "rank 1: exit code 3" in report


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_loop_and_three_libraries_are_measured_as_they_are(cluster, kit, launcher) -> None:
    for library in UNCHANGED[1:]:
        if importlib.util.find_spec(library) is None:
            needs.unavailable(f"{library} is not installed (make venv, or '.[adapters]')")
    words = ["--launcher", launcher, "--max-running", "1"]  # at once, they wait for cores
    name = f"unchanged-{launcher}"
    jobs = started(cluster, kit, "unchanged", *words, "--name", name)
    rows = collected(cluster, kit, name, jobs)
    assert {(r["status"], r["throughput_unit"]) for r in rows} == {("ok", "samples/s")}
    sources = {row["kind"]: row["throughput_source"] for row in rows}
    assert sources == dict.fromkeys(UNCHANGED, "auto")
    report = (kit.folder / "logs" / name / "report.html").read_text()
    assert "images" not in report.replace("data:image", "")
