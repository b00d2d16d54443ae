"""What gpu-check.sh measures itself, with stubs of torch.cuda; the script for real, on the CPU."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from jobkit.checks import gpu
from jobkit.checks.gpu import Number
from jobkit.checks.preflight.judge import runs_on
from jobkit.errors import UsageError
from jobkit.payload.distributed import Group
from jobkit.payload.place import RankEnv
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import FakeCuda
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
    numbers = gpu.epoch(SPEC, group)
    assert modes == ["error", "default", "default"]
    assert [n.value for n in numbers if n.name.endswith("wait for the GPU")] == [0.0]
    assert not any(n.missed for n in numbers)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    gpu.sync_debug(torch.device("cuda"), "error")
    gpu.sync_debug(torch.device("cpu"), "default")
    assert modes[3:] == ["error"]


def test_a_step_that_waits_is_named_with_its_place(group, monkeypatch, capsys) -> None:
    optimizer_step = torch.optim.SGD.step
    modes: list[str] = []

    def waits(self, *args):
        if modes:
            raise RuntimeError("called a synchronizing CUDA operation")
        return optimizer_step(self, *args)

    monkeypatch.setattr(gpu, "sync_debug", lambda _, mode: modes.append(mode))
    monkeypatch.setattr(torch.optim.SGD, "step", waits)
    (number,) = gpu.epoch(SPEC, group)
    assert number.missed and "rank 0: called a synchronizing CUDA operation at " in number.why
    assert ".py:" in number.why and gpu.show([number]) == 4
    assert capsys.readouterr().out.startswith("MISSED mlp single: steps that wait for the GPU: 1")


def test_a_number_is_missed_outside_of_its_bounds_only() -> None:
    table = [(1.0, 1.0, 2.0, False), (0.9, 1.0, None, True), (2.1, None, 2.0, True)]
    table += [(None, 1.0, 2.0, False), (float("nan"), 1.0, 2.0, True), (7.0, None, None, False)]
    for value, least, most, missed in table:
        assert Number("x", value, "", least, most).missed is missed, (value, least, most)


def test_code_runs_on_gpus_of_its_architecture_and_ptx_on_later_ones() -> None:
    wheel = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    runs = {"70": False, "80": True, "89": True, "90": True, "103": True, "110": False}
    for capability, right in runs.items():
        assert any(runs_on(name, f"sm_{capability}") for name in wheel) is right, capability
    assert not runs_on("sm_90a", "sm_110") and runs_on("compute_90", "sm_110")


@pytest.mark.parametrize("case", ["fits", "old driver", "no code", "few cores"])
def test_the_environment_comes_first_and_says_the_fix(case: str, monkeypatch, capsys) -> None:
    cuda = FakeCuda(monkeypatch, "GPU-a", "GPU-b")
    capability = (7, 0) if case == "no code" else (9, 0)
    properties = SimpleNamespace(name="H", major=capability[0], minor=capability[1])

    def driver(_: int) -> SimpleNamespace:
        if case == "old driver":
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")
        return properties

    cuda.mock("get_device_properties", driver)
    cuda.mock("get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    cores = range(2 if case == "few cores" else 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cores))
    if case in ("old driver", "no code"):
        with pytest.raises(UsageError, match="install a torch for this driver and GPU: make LOCK="):
            gpu.environment("cuda")
        return
    assert gpu.show(gpu.environment("cuda")) == (4 if case == "few cores" else 0)
    out = capsys.readouterr().out
    assert "GPU: H, sm_90" in out and ("--cpus-per-task" in out)


@pytest.mark.long
def test_the_script_rehearsed_on_the_cpu(tmp_path) -> None:
    words = ["bash", str(ROOT / "hpc" / "gpu-check.sh"), "--device", "cpu"]
    done = subprocess.run(
        [*words, "--folder", str(tmp_path / "check")],
        env=environment(), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("environment", "preflight", "comm", "verify", "epoch", "stop"):
        assert f"ok     {part}: " in done.stdout, done.stdout
    assert "steps that wait for the GPU: 0 (at most 0)" in done.stdout
    assert '"status": "preempted"' in (tmp_path / "check/stop/attempts/0/outcome.json").read_text()
    assert (tmp_path / "check.tar.gz").stat().st_size > 1000
