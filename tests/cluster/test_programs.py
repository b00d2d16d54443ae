"""Unchanged loops of torch, Lightning, transformers and Accelerate in studies on Slurm (long)."""

import importlib.util
import sys

import pytest

from jobkit.analysis.collect.results import collect
from jobkit.analysis.report.report import write_report
from support import needs
from support.records import rows_of
from support.training_programs import PROGRAMS

UNCHANGED = ("plain", "lightning", "transformers", "accelerate")
STUDY = f"""
name = "unchanged"
command = ["{sys.executable}", "train_{{kind}}.py"]
gpus = ["2x1"]
[parameters]
kind = "plain"
[sweep]
kind = [{", ".join(map(repr, UNCHANGED))}]
"""


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_loop_and_three_libraries_are_measured_as_they_are(cluster, kit, launcher) -> None:
    for library in UNCHANGED[1:]:
        if importlib.util.find_spec(library) is None:
            needs.unavailable(f"{library} is not installed (make venv, or '.[adapters]')")
    words = ["--launcher", launcher, "--max-running", "1"]  # at once, they wait for cores
    name = f"unchanged-{launcher}"
    for kind in UNCHANGED:
        (kit.folder / f"train_{kind}.py").write_text(PROGRAMS[kind])
    (kit.folder / "unchanged.toml").write_text(STUDY)
    words += ["--study", str(kit.folder / "unchanged.toml")]
    for job_id in kit.start(cluster, name, *words, OMP_NUM_THREADS="1"):
        cluster.wait(job_id)
    folder = kit.folder / "logs" / name
    write_report(collect(str(folder)), [])
    rows = rows_of(folder / "results.csv")
    assert {(r["status"], r["throughput_unit"]) for r in rows} == {("ok", "samples/s")}
    sources = {row["kind"]: row["throughput_source"] for row in rows}
    assert sources == dict.fromkeys(UNCHANGED, "auto")
    report = (folder / "report.html").read_text()
    assert "images" not in report.replace("data:image", "")
