"""The GPU check rehearsed for real, small, on the CPU; and its observer with a stub of torch.cuda.

The study and the drill, most of a rehearsal's two minutes, have cluster tests of their own: here
what they leave is read from files in their form.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from jobkit.checks.gpu_check import results, step
from jobkit.payload.distributed import Group, RankEnv
from jobkit.spec.runspec import RunSpec
from support.rigs import environment

REHEARSED = ("step", "preflight", "comm", "verify")


@pytest.fixture
def group():
    made = Group(RankEnv(), torch.device("cpu"), 60.0)
    yield made
    made.close()


def small(**settings) -> RunSpec:
    return RunSpec(
        strategy="single", model="mlp", dataset="synthetic", train_samples=96, test_samples=8,
        global_batch_size=32, device="cpu", **settings,
    )  # fmt: skip


def test_a_rehearsal_measures_packs_and_resumes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "jobkit", "gpu-check", "--device", "cpu"]
    words += ["--folder", str(tmp_path / "check"), "--parts", *REHEARSED]
    env = environment(MY_TOKEN="s3cr3t", NCCL_SOCKET_IFNAME="lo")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "check.tar.gz") as tar:
        names = tar.getnames()
        content = {name: tar.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    assert not [name for name in names if b"s3cr3t" in content[name]]
    text = content["check/report.md"].decode()
    assert text.startswith("# rehearsal on the CPU") and "| NCCL_SOCKET_IFNAME | lo |" in text
    for name in REHEARSED:
        result = json.loads(content[f"check/{name}/result.json"])
        assert (result["state"], result["reason"]) == ("pass", ""), name
        assert result["measures"] and result["took_s"] > 0.5, name
    again = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and again.stdout.count("pass in") == len(REHEARSED)


def test_every_step_of_an_epoch_but_not_its_ends_may_not_wait(group, monkeypatch) -> None:
    modes = []
    monkeypatch.setattr(step, "sync_debug", lambda _, mode: modes.append(mode))
    found = step.steps(small(), group)
    assert modes == ["error", "default", "default"]
    assert found["issue_s"] > 0 and found["step_s"] > 0 and "waits" not in found
    monkeypatch.undo()
    set_modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_modes.append)
    step.sync_debug(torch.device("cuda"), "error")
    step.sync_debug(torch.device("cpu"), "error")
    assert set_modes == ["error"]


def test_a_step_that_waits_is_named_with_its_place(group, monkeypatch) -> None:
    """What torch raises in this mode, by a stub: a GPU has to raise it for real."""
    optimizer_step = torch.optim.SGD.step

    def waits(self, *args):
        if active:
            raise RuntimeError("called a synchronizing CUDA operation")
        return optimizer_step(self, *args)

    active: list[str] = []
    monkeypatch.setattr(
        step, "sync_debug", lambda _, mode: active.append(mode) if mode == "error" else None
    )
    monkeypatch.setattr(torch.optim.SGD, "step", waits)
    found = step.steps(small(), group)
    assert found["waits"].startswith("called a synchronizing CUDA operation at ")
    assert ".py:" in found["waits"] and "step_s" not in found


def test_the_speeds_of_a_device_are_those_of_its_work(monkeypatch) -> None:
    monkeypatch.setattr(step, "seconds", lambda device, act: (act(), 0.001)[1])
    found = step.speeds(torch.device("cpu"))
    assert found["fp32_tflops"] == pytest.approx(2 * 256**3 / 0.001 / 1e12)
    assert found["memory_gb_per_s"] == pytest.approx(2 * 8 * 2**20 / 0.001 / 1e9)
    assert 0 < found["fp32_error"] < 1e-5


def test_waits_and_errors_of_a_gpu_are_judged(tmp_path: Path) -> None:
    one = {"model": "cnn", "strategy": "ddp", "precision": "fp32", "waits": "", "step_s": 0.002}
    one |= {"issue_s": 0.001, "images_per_s": 1e5, "data_wait_share": 0.8}
    speeds = {"fp32_tflops": 18.0, "tf32_tflops": 120.0, "bf16_tflops": 250.0}
    speeds |= {"memory_gb_per_s": 1700.0, "from_host_gb_per_s": 20.0}
    speeds |= {"fp32_error": 1e-7, "tf32_error": 1e-7}  # --fp32 tf32 changed nothing
    content = {"device": "NVIDIA A100-SXM4-80GB", "speeds": speeds, "steps": [one]}
    (tmp_path / "step.json").write_text(json.dumps(content))
    found = {m.name: m.verdict for m in results.step(tmp_path)}
    assert [name for name in found if found[name] == "FAIL"] == [
        "error of tf32 products", "cnn ddp fp32: waiting for data",
    ]  # fmt: skip
    assert found["cnn ddp fp32: steps that wait for the GPU"] == "pass"
    content["steps"] = [{**one, "waits": "called a synchronizing CUDA operation at x.py:1"}]
    (tmp_path / "step.json").write_text(json.dumps(content))
    found = {m.name: m.verdict for m in results.step(tmp_path)}
    assert found["cnn ddp fp32: steps that wait for the GPU"] == "FAIL"


COMM = """operation,scope,ranks,bytes,time_s,bus_gb_per_s,correct,pipelined_time_s
all_reduce,all,2,1024,2e-5,0.1,{right},{pipelined}
all_reduce,all,2,268435456,1e-3,268.0,True,0.0009
"""


@pytest.mark.parametrize(
    ("right", "pipelined", "failed"),
    [
        ("True", "5e-6", []),
        ("False", "5e-6", ["wrong results"]),
        ("True", "9e-5", ["all_reduce of"]),
    ],
)
def test_results_of_comm(tmp_path: Path, right: str, pipelined: str, failed: list[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "comm.csv").write_text(COMM.format(right=right, pipelined=pipelined))
    found = [m.name for m in results.comm(tmp_path) if m.verdict == "FAIL"]
    assert len(found) == len(failed) and all(map(str.startswith, found, failed))


def test_results_of_a_study_and_of_a_drill(tmp_path: Path) -> None:
    """With the column names that the tables have."""
    from jobkit.analysis.tables.columns import SCALING
    from jobkit.analysis.tables.run_columns import RESULTS
    from jobkit.drill.row import Row

    assert {"run_id", "status"} <= {column.name for column in RESULTS}
    assert {"series", "world_size", "efficiency"} <= {column.name for column in SCALING}
    assert {"fault", "final_status", "same_parameters"} <= set(Row.__dataclass_fields__)
    own = tmp_path / "logs" / "gpu-check"
    own.mkdir(parents=True)
    (own / "results.csv").write_text("run_id,status\na,ok\nb,oom\n")
    (own / "scaling.csv").write_text("series,world_size,efficiency\nddp,1,1.0\nddp,2,\n")
    found = {m.name: (m.verdict, m.why) for m in results.study(tmp_path)}
    assert found["runs that are not ok"] == ("FAIL", "b") and found["reports"][0] == "FAIL"
    assert len(found) == 3
    drill = tmp_path / "logs" / "drill"
    drill.mkdir()
    rows = "kill,ok,yes\nwarning,failed,no\n"
    (drill / "drill.csv").write_text(f"fault,final_status,same_parameters\n{rows}")
    assert [(m.value, m.verdict) for m in results.drill(tmp_path)] == [
        (2, "pass"), (1, "FAIL"), (1, "FAIL"),
    ]  # fmt: skip


def test_two_runs_that_should_be_the_same_are_compared(forge, tmp_path: Path) -> None:
    words = ["--dataset", "synthetic", "--train-samples", "64", "--test-samples", "8", "--model"]
    words += ["mlp", "--epochs", "1", "--global-batch-size", "32", "--breakdown-iterations", "0"]
    for name, seed in (("same-bits-1", "1"), ("same-bits-2", "1"), ("same-bits-3", "2")):
        forge(1, *words, "--seed", seed, "--strategy", "single", run_dir=tmp_path / name)
        found = {m.name: m.verdict for m in results.train(tmp_path)}
        expected = {"same-bits-1": None, "same-bits-2": "pass", "same-bits-3": "FAIL"}[name]
        assert found.get("runs with other losses") == expected
    assert found["processes on more than one GPU"] == "not measured"
