"""A user's own program in a study, from its command to the report: each way to measure it."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.analysis.cli import plot_main
from jobkit.analysis.collect.results import collect
from jobkit.analysis.report.report import write_report
from jobkit.launch.cli import main
from support.place import ROOT
from support.training_programs import LEAVES, PRINTS

# Not one line of it knows of jobkit.
TORCH = (
    LEAVES
    + """
import os, sys, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
torch.set_num_threads(1)
data = TensorDataset(torch.randn(640, 32), torch.randint(0, 4, (640,)))
sampler = DistributedSampler(data) if dist.is_initialized() else None
loader = DataLoader(data, batch_size=int(sys.argv[1]), sampler=sampler)
model = torch.nn.Linear(32, 4)
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
if dist.is_initialized():
    dist.destroy_process_group()
"""
)
TORCH_STUDY = """
name = "torch"
command = ["{python}", "{program}", "{{batch}}"]
gpus = [1, 2]
warmup_steps = 10
[parameters]
batch = 16
[work]
scaling = "weak"
unit = "samples"
per_step = "{{batch * ranks}}"
"""
PRINTS_STUDY = """
name = "prints"
command = ["{python}", "{program}"]
gpus = [1, 2, 4]
pattern = "nanogpt"
auto = false
[work]
unit = "tokens"
per_step = 1000
scaling = "strong"
"""


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    return tmp_path / "logs"


def study(tmp_path: Path, program: str, text: str, draws: bool = False) -> Path:
    """Run the study of a program, collect it, write its report; return its folder."""
    (tmp_path / "train.py").write_text(program)
    values = {"python": sys.executable, "program": tmp_path / "train.py"}
    file = tmp_path / "study.toml"
    file.write_text(text.format(**values))
    argv = [sys.executable, "run_benchmarks.py", "--site", "local", "--study", str(file)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = collect(text.split('"')[1])
    if draws:
        assert plot_main([results.folder.name]) == 0
    else:
        write_report(results, [])
    return results.folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return sorted(csv.DictReader(file), key=lambda row: int(row["world_size"]))


def test_a_program_of_torch_is_measured_without_a_change(tmp_path: Path) -> None:
    folder = study(tmp_path, TORCH, TORCH_STUDY, draws=True)
    found = rows(folder / "results.csv")
    assert [row["status"] for row in found] == ["ok", "ok"]
    assert [row["throughput_source"] for row in found] == ["auto", "auto"]
    assert {row["throughput_unit"] for row in found} == {"samples/s"}
    assert [row["batch"] for row in found] == ["16", "16"]
    # 640 samples in batches of 16 are 40 steps an epoch on one rank, and 20 on each of two.
    steps = rows(folder / "steps.csv")
    counted = {n: sum(int(s["steps"]) for s in steps if s["world_size"] == n) for n in ("1", "2")}
    assert counted == {"1": 240, "2": 120}
    for row in found:
        size, step_s = int(row["world_size"]), float(row["step_time_s"])
        assert float(row["throughput"]) == pytest.approx(16 * size / step_s, rel=1e-6)
    report = (folder / "report.html").read_text()
    assert "Weak scaling: the fastest is train on" in report and "samples per second" in report
    assert "images" not in report.replace("data:image", "")
    assert (folder / "figures" / "throughput.png").stat().st_size > 5000


def test_a_program_that_only_prints_is_read_by_a_pattern(tmp_path: Path) -> None:
    folder = study(tmp_path, PRINTS, PRINTS_STUDY)
    found = rows(folder / "results.csv")
    assert [float(row["throughput"]) for row in found] == pytest.approx([1e4, 2e4, 4e4])
    assert {row["throughput_source"] for row in found} == {"pattern nanogpt"}
    assert {row["throughput_unit"] for row in found} == {"tokens/s"}
    (four,) = [row for row in rows(folder / "scaling.csv") if row["world_size"] == "4"]
    assert float(four["efficiency"]) == pytest.approx(1.0)
    assert four["time_of"] == "100,000 tokens"
    assert "40,000 tokens per second" in (folder / "report.html").read_text()


def test_of_a_program_that_prints_nothing_the_wall_time_counts_and_says_so(
    tmp_path: Path,
) -> None:
    text = PRINTS_STUDY.replace('pattern = "nanogpt"\n', "").replace("[1, 2, 4]", "[1, 2]")
    folder = study(tmp_path, "import time; time.sleep(0.5)", text)
    found = rows(folder / "results.csv")
    assert [row["status"] for row in found] == ["ok", "ok"]
    for row in found:
        assert row["throughput_source"] == "wall time of the run, start-up included"
        assert float(row["throughput"]) == pytest.approx(3600 / float(row["wall_time_s"]))
    assert "start-up included" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('pattern = "nanogtp"', "did you mean 'nanogpt'"),
        ('[patterns]\nline = "(?P<tokens_per_s>[0-9]+)"', "of all ranks or of one"),
        ('[patterns]\nline = "step ("', "does not compile"),
        ('[patterns]\nline = "(?P<step>[0-9]+)"', "no group says a time or a rate"),
    ],
)
def test_a_bad_pattern_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logs: Path, table: str, says: str
) -> None:
    file = tmp_path / "study.toml"
    file.write_text(f'name = "bad"\ncommand = ["true"]\ngpus = [1]\n{table}\n')
    assert main(["--site", "local", "--study", str(file)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (logs / "bad").exists()
