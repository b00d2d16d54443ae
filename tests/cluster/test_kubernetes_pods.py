"""The manifests of a run, played: two pods of two ranks train, one is deleted and replaced."""

import csv
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jobkit.analysis.cli import collect_main
from jobkit.launch.cli import main as run_benchmarks
from support.place import ROOT
from support.pods import PlayedJob, image_of_this_machine

WORDS = ["--to", "kubernetes", "--image", "none:0", "--gpu-resource", "none", "--gpus", "2x2"]
TRAINING = ["--strategies", "ddp", "--repeats", "1", "--name", "pods", "--model", "mlp"]
SHORT = [
    "--test-samples",
    "256",
    "--dataset",
    "synthetic",
    "--train-samples",
    "2048",
    "--global-batch-size",
    "256",
]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
]


@pytest.fixture
def mount() -> Iterator[Path]:
    """Where the pods have the volume: in their own mounts, but the folder must be there."""
    folder = Path("/runs")
    there = folder.exists()
    folder.mkdir(exist_ok=True)
    yield folder
    if not there:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_deleted_pod_is_replaced_and_goes_on(
    tmp_path: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    length = ["--epochs", "40", "--checkpoint-every", "epoch", "--device", "cpu"]
    assert run_benchmarks([*WORDS, *TRAINING, *SHORT, *length]) == 0
    (manifest,) = (tmp_path / "logs" / "pods" / "kubernetes").glob("*.yaml")
    volume, logs = tmp_path / "volume", tmp_path / "kubectl"
    volume.mkdir(), logs.mkdir()
    image = image_of_this_machine(Path(sys.executable), ROOT / "src")
    job = PlayedJob(list(yaml.safe_load_all(manifest.read_text())), image, volume, logs)
    job.start()
    try:
        saved = volume / "pods" / manifest.stem / "checkpoints"
        assert job.run(300, lambda: saved.exists() and any(saved.iterdir())), job.log()
        job.delete(1)
        assert job.run(300, lambda: len(job.codes) >= 2), job.log()
        job.run(300)
    finally:
        job.stop()
    assert job.ended == "Complete", job.log()
    # SIGTERM to one pod: the ranks of both saved and ended, which does not count as a failure.
    assert sorted(job.codes[:2]) == [(0, 75), (1, 75)] and job.failed == 0, job.log()
    outcome = json.loads((saved.parent / "attempts" / "0" / "outcome.json").read_text())
    assert (outcome["status"], outcome["exit_code"]) == ("preempted", 75)
    assert "resum" in job.log()
    # What the first pods printed is enough, as `kubectl logs` would save it.
    run = tmp_path / "logs" / "pods" / manifest.stem
    run.mkdir(exist_ok=True)
    (run / "train.log").write_text("".join(f.read_text() for f in sorted(logs.glob("pod-*-0.log"))))
    assert collected(tmp_path)
    (run / "train.log").unlink()
    shutil.copytree(volume / "pods", tmp_path / "logs" / "pods", dirs_exist_ok=True)
    assert collected(tmp_path)


def collected(folder: Path) -> bool:
    """Whether the study's one run is ok, and went on where it had been stopped."""
    assert collect_main(["pods"]) == 0
    with (folder / "logs" / "pods" / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    return (row["status"], row["attempts"], row["epochs_done"]) == ("ok", "2", "40")
