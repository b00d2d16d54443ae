"""What gpu-check.sh measures itself, with stubs of torch.cuda; the script for real, on the CPU."""

import math
import subprocess

import pytest
import torch

from jobkit.checks import gpu
from jobkit.checks.preflight.judge import runs_on
from jobkit.payload.distributed import Group
from jobkit.payload.place import RankEnv
from jobkit.spec.runspec import RunSpec
from support.place import ROOT
from support.rigs import environment


@pytest.fixture
def group():
    made = Group(RankEnv(), torch.device("cpu"), 60.0)
    yield made
    made.close()


SPEC = RunSpec(
    strategy="single", model="mlp", dataset="synthetic", train_samples=96, test_samples=8,
    global_batch_size=32, device="cpu",
)  # fmt: skip


def test_every_step_of_an_epoch_but_not_its_ends_may_not_wait(group, monkeypatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(gpu, "sync_debug", lambda _, mode: modes.append(mode))
    lines = gpu.epoch(SPEC, group)
    assert modes == ["error", "default", "default"]
    assert lines[0] == "ok     mlp single: steps that wait for the GPU: 0 (at most 0)"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    gpu.sync_debug(torch.device("cuda"), "error")
    gpu.sync_debug(torch.device("cpu"), "default")
    assert modes[3:] == ["error"]


def test_a_step_that_waits_is_named_with_its_place(group, monkeypatch) -> None:
    optimizer_step = torch.optim.SGD.step
    modes: list[str] = []

    def waits(self, *args):
        if modes:
            raise RuntimeError("called a synchronizing CUDA operation")
        return optimizer_step(self, *args)

    monkeypatch.setattr(gpu, "sync_debug", lambda _, mode: modes.append(mode))
    monkeypatch.setattr(torch.optim.SGD, "step", waits)
    (line,) = gpu.epoch(SPEC, group)
    assert line.startswith("MISSED mlp single: steps that wait for the GPU: 1 (at most 0)")
    assert "rank 0: called a synchronizing CUDA operation at " in line and ".py:" in line


def test_a_number_is_missed_outside_of_its_bounds_only() -> None:
    for value, low, high, missed in [
        (1.0, 1.0, 2.0, False), (0.9, 1.0, math.inf, True), (2.1, -math.inf, 2.0, True),
        (float("nan"), 1.0, 2.0, True),
    ]:  # fmt: skip
        assert gpu.line("x", value, low, high).startswith("MISSED") is missed, value


def test_code_runs_on_gpus_of_its_architecture_and_ptx_on_later_ones() -> None:
    wheel = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    runs = {"70": False, "80": True, "89": True, "90": True, "103": True, "110": False}
    for capability, right in runs.items():
        assert any(runs_on(name, f"sm_{capability}") for name in wheel) is right, capability
    assert not runs_on("sm_90a", "sm_110") and runs_on("compute_90", "sm_110")


@pytest.mark.long
def test_the_script_rehearsed_on_the_cpu(tmp_path) -> None:
    words = ["bash", str(ROOT / "hpc" / "gpu-check.sh"), "--device", "cpu"]
    done = subprocess.run(
        [*words, "--folder", str(tmp_path / "check")],
        env=environment(), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("preflight", "comm", "verify", "epoch", "stop", "recipe"):
        assert f"ok     {part}: " in done.stdout, done.stdout
    assert "steps that wait for the GPU: 0 (at most 0)" in done.stdout
    assert '"status": "preempted"' in (tmp_path / "check/stop/attempts/0/outcome.json").read_text()
    assert (tmp_path / "check.tar.gz").stat().st_size > 1000
