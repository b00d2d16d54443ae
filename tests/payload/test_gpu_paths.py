"""What a rank does on a GPU, with mocked GPUs: dp, the checkpoint thread, versions, refusals."""

import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from jobkit import gpus
from jobkit.errors import Exit, UsageError
from jobkit.paths import RunPaths
from jobkit.payload import host, leaving
from jobkit.payload.checkpoints import store
from jobkit.payload.checkpoints.manager import CheckpointManager
from jobkit.payload.distributed import Group, follow_timeout
from jobkit.payload.place import RankEnv
from jobkit.payload.run import check_sync_batchnorm
from jobkit.payload.strategies.dp import DP
from jobkit.spec.every import Every
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import FakeCuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def on_two_gpus(monkeypatch: pytest.MonkeyPatch, precision: str) -> DP:
    """dp as on two GPUs, computing on the CPU: nn.DataParallel passes the model through."""
    monkeypatch.setattr(nn, "DataParallel", lambda model: model)
    made = DP(RunSpec(strategy="dp", precision=precision), RankEnv(), CPU)
    made.devices = 2
    return made


def test_each_thread_of_dp_computes_in_the_precision_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's parallel_apply opens autocast without a type, which is bf16 on a CPU."""
    dp, found = on_two_gpus(monkeypatch, "fp16"), []
    model = dp.wrap(nn.Linear(4, 2))

    def work() -> None:
        with torch.amp.autocast("cpu", enabled=True):
            found.append(model(torch.ones(1, 4)).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [torch.float16]


def test_names_under_dp_are_those_of_the_bare_model(monkeypatch: pytest.MonkeyPatch) -> None:
    dp, model = on_two_gpus(monkeypatch, "fp32"), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    dp.model = dp.wrap(model)
    assert list(dp.named_parameters()) == [name for name, _ in model.named_parameters()]
    assert list(dp.named_buffers()) == [name for name, _ in model.named_buffers()]


def test_dp_drives_all_gpus_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, *"abcd")
    assert DP(RunSpec(strategy="dp"), RankEnv(), torch.device("cuda", 0)).devices == 4
    assert DP(RunSpec(strategy="dp"), RankEnv(), CPU).devices == 1


def test_copies_of_tensors_are_written_without_a_stream() -> None:
    copied = store._writer(Path("x"), [torch.zeros(1)])
    assert copied.per_thread_copy_ahead == 0
    live = store._writer(Path("x"), [torch.zeros(1, device="meta")])
    assert live.per_thread_copy_ahead == FileSystemWriter("x").per_thread_copy_ahead > 0


@pytest.mark.parametrize(("device", "chosen"), [(GPU, [GPU]), (CPU, []), (None, [])])
def test_the_checkpoint_thread_is_on_the_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None, chosen: list[torch.device]
) -> None:
    cuda = FakeCuda(monkeypatch)
    made = CheckpointManager(
        None,
        RunPaths(Path("x")),
        0,
        None,
        Every(),
        keep=1,
        background=True,
        device=device,  # type: ignore[arg-type]
    )
    assert made._thread
    assert made._thread.submit(lambda: 7).result(100) == 7
    assert cuda.chosen == chosen


def test_an_empty_part_of_a_synchronised_batch_norm_is_refused() -> None:
    spec = RunSpec(strategy="ddp", sync_batchnorm=True, precision="bf16", global_batch_size=512)
    check_sync_batchnorm(spec, 4, 1024)
    with pytest.raises(UsageError, match="the last batch of an epoch has 3 samples for 4 ranks"):
        check_sync_batchnorm(spec, 4, 512 + 3)
    check_sync_batchnorm(replace(spec, precision="fp32"), 4, 512 + 3)


def test_versions_on_amds_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    found = host.versions(GPU)
    assert (found["hip"], found["nccl"], "cuda" in found) == ("6.4.1", "2.22.3", False)


def test_the_state_of_the_gpu_is_that_of_its_uuid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FakeCuda(monkeypatch, "aa", "bb")
    monkeypatch.setattr(gpus, "_AMD_DRIVER", tmp_path / "absent")
    smi = tmp_path / "nvidia-smi"
    said = "570.1, 1980 MHz, [N/A], 700.00 W, 0"
    smi.write_text(f'#!/bin/sh\n[ "$4" = GPU-bb ] && echo "{said}"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    state = {"driver": "570.1", "gpu_max_clock": "1980 MHz", "gpu_power_limit": "700.00 W"}
    assert host.gpu_state(GPU) == {**state, "gpu_ecc_errors": "0"}
    assert host.gpu_state(CPU) == {}
    smi.unlink()
    assert host.gpu_state(GPU) == {}


def test_each_rank_has_a_cache_of_miopen_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ: dict[str, str] = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(gpus, "_AMD_DEVICE", tmp_path / "absent")
    gpus.prepare_rocm(3, environ)
    assert len(environ) == 1
    monkeypatch.setattr(gpus, "_AMD_DEVICE", tmp_path)
    gpus.prepare_rocm(3, environ)
    assert environ["MIOPEN_USER_DB_PATH"].endswith("-3")
    assert environ["PYTORCH_MIOPEN_SUGGEST_NHWC"] == "1"


def test_the_driver_of_amds_gpus_is_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text("6.10.10\n")
    monkeypatch.setattr(gpus, "_AMD_DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    known = SimpleNamespace(uuid="aa")
    FakeCuda(monkeypatch, "aa").mock("get_device_properties", lambda _: known)
    assert host.gpu_state(GPU) == {"driver": "6.10.10"}


def test_the_memory_that_the_device_says_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's context and NCCL's buffers are outside what torch counts."""
    cuda = FakeCuda(monkeypatch, "a", "b")
    cuda.mock("max_memory_allocated", lambda _: 100 * 2**20)
    cuda.mock("max_memory_reserved", lambda _: 200 * 2**20)
    cuda.mock("mem_get_info", lambda device: ((1000 - 700 * device.index) * 2**20, 1000 * 2**20))
    assert host.peak_memory_mib(GPU)[:2] == (100, 200)
    assert host.peak_memory_mib(GPU).device == 700

    def unknown(_: torch.device) -> None:
        raise RuntimeError("CUDA error: operation not supported")

    cuda.mock("mem_get_info", unknown)
    assert math.isnan(host.peak_memory_mib(GPU).device)
    assert math.isnan(host.peak_memory_mib(CPU).device)


@pytest.mark.parametrize(
    ("timeout_s", "heartbeat", "dump"), [(600, "600", "15000"), (1800, "1800", "15000")]
)
def test_nccls_own_limits_follow_the_timeout(timeout_s: float, heartbeat: str, dump: str) -> None:
    environ: dict[str, str] = {}
    follow_timeout(timeout_s, environ)
    assert list(environ.values()) == [heartbeat, dump]


def test_nccls_dump_takes_a_small_part_of_a_short_timeout_and_the_user_decides() -> None:
    environ = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7"}
    follow_timeout(20, environ)
    assert environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "7"
    assert environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "500"
    follow_timeout(20, fresh := {})
    assert fresh["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "60"


@pytest.mark.parametrize(("device", "ahead"), [(GPU, True), (CPU, False)])
def test_a_group_on_gpus_is_made_with_these_limits(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, ahead: bool
) -> None:
    name, seen = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", list[str | None]()
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
    make = lambda **_: seen.append(os.environ.get(name))  # noqa: E731
    monkeypatch.setattr(dist, "init_process_group", make)
    Group(RankEnv(), device, 900.0)
    assert seen == ["900" if ahead else None]
    for each in (name, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"):
        os.environ.pop(each, None)


@pytest.mark.parametrize(
    ("variable", "code", "tidy"),
    [
        ("NSYS_PROFILING_SESSION_ID", Exit.OK, True),
        ("ROCP_TOOL_LIBRARIES", Exit.AGAIN, True),
        ("CUDA_INJECTION64_PATH", Exit.FAILED, False),  # others may be waiting: at once
        ("", Exit.OK, False),
    ],
)
def test_a_profiled_process_ends_as_its_profiler_needs_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, code: Exit, tidy: bool
) -> None:
    class AtOnce(Exception):
        """Instead of the end of this process."""

    def at_once(_: int) -> None:
        raise AtOnce

    for name in leaving._PROFILED:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "x")
    monkeypatch.setattr(os, "_exit", at_once)
    with pytest.raises(SystemExit if tidy else AtOnce):
        leaving.leave(code)
