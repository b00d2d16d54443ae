"""Which device each rank takes, and what it does on a GPU. The GPUs are fakes."""

import math
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from jobkit import gpus
from jobkit.errors import Exit, UsageError
from jobkit.payload import distributed
from jobkit.payload import main as leaving
from jobkit.payload.device import gpu_state, peak_memory_mib
from jobkit.payload.distributed import Candidate, agreed, candidate, join
from jobkit.payload.place import RankEnv, share_of_cores
from jobkit.payload.strategies.local import DP
from jobkit.program import process
from jobkit.spec.runspec import RunSpec
from support.place import script
from support.rigs import ROOT, environment

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class FakeCuda:
    """GPUs of one process, by their UUIDs. chosen: the devices that set_device was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
        self.chosen, self._patch = [], monkeypatch
        each = [SimpleNamespace(uuid=uuid, name="Fake") for uuid in uuids]
        self.mock("device_count", lambda: len(uuids))
        self.mock("is_available", lambda: True)
        self.mock("set_device", self.chosen.append)
        self.mock("get_device_properties", lambda device: each[getattr(device, "index", device)])
        self.mock("get_device_name", lambda _=None: "Fake")

    def mock(self, name: str, value: object) -> None:
        """Replace a function of torch.cuda."""
        self._patch.setattr(torch.cuda, name, value)


def gpu(uuid: str, host: str = "n1", visible: int = 1, **more: str) -> Candidate:
    return Candidate(host, f"machine {host}", visible, uuid=uuid, **more)


NONE = Candidate("n2", "machine n2")
FOUR = [gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-b", "n2"), gpu("GPU-c", "n2")]
SAME = [gpu("GPU-a"), gpu("GPU-a")]
BUS = [gpu("", bus="0:1:0"), gpu("", bus="0:1:0")]


@pytest.mark.parametrize(
    ("found", "wanted", "on_slurm", "kind", "line"),
    [
        # All of a node's, each its own only, or two of four as --gpu-bind=closest shows them.
        *(([gpu(f"GPU-{i}", visible=n) for i in range(4)], "auto", True, "cuda", "")
          for n in (1, 2, 4)),
        ([BUS[0], gpu("", "n2", bus="0:1:0")], "auto", True, "cuda", ""),
        # AMD's GPUs may all say the same id.
        ([gpu("0", bus=f"0:{i}:0") for i in range(2)], "auto", True, "cuda", ""),
        ([NONE, NONE], "auto", True, "cpu", ""),
        (SAME, "auto", False, "cpu", "1 GPU for 2 ranks: all ranks compute on the CPU"),
        *((FOUR, wanted, True, None, "^rank 1 on n1, rank 2 on n2 would share one GPU .GPU-b")
          for wanted in ("auto", "cuda")),
        (SAME, "cuda", False, None, "would share one GPU"),
        (BUS, "auto", True, None, "rank 0 on n1, rank 1 on n1 would share one GPU .0:1:0"),
        # To NCCL the instances of one partitioned GPU are the same.
        ([gpu(f"MIG-{i}", bus="0:1:0") for i in range(2)], "auto", True, None, "one GPU .MIG-0"),
        ([gpu("GPU-a"), NONE], "auto", True, None, "^rank 1 on n2: no GPU is visible there, and"),
        ([NONE, NONE], "cuda", True, None, "--device cuda: no GPU is visible here"),
    ],
)  # fmt: skip
def test_each_rank_has_its_own_gpu_or_all_have_none(found, wanted, on_slurm, kind, line) -> None:
    if kind:
        assert agreed(found, wanted, on_slurm=on_slurm) == (kind, line)
    else:
        with pytest.raises(UsageError, match=line):
            agreed(found, wanted, on_slurm=on_slurm)


def test_a_gpu_that_torch_cannot_open_is_one_line(monkeypatch) -> None:
    """Of a partitioned GPU torch counts more devices before it opens one than afterwards."""
    old = "The NVIDIA driver on your system is too old (found version 12060)."
    for error, line in (
        (AssertionError("Invalid device id"), "rank 0 on .*Invalid device id.; check nvidia-smi"),
        (RuntimeError(old), "too old .*make LOCK= venv .*CUDA 12.6"),
    ):
        cuda = FakeCuda(monkeypatch, "GPU-a")
        cuda.mock("get_device_properties", Mock(side_effect=error))
        with pytest.raises(UsageError, match=line):
            agreed([candidate("auto", RankEnv())], "auto", on_slurm=False)


def test_the_gpu_is_the_local_ranks_of_those_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks hear of all ranks' GPUs, and so conclude the same."""
    cuda, place = FakeCuda(monkeypatch, "a", "b"), RankEnv(rank=3, local_rank=3, world_size=4)
    said, uuids = list[str](), ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert candidate("auto", place).index == 1
    assert candidate("cpu", RankEnv()).visible == 0

    class Group(SimpleNamespace):
        def gather(self, own: Candidate) -> list[Candidate]:
            return [replace(own, uuid=uuid, index=i) for i, uuid in enumerate(uuids)]

    made = lambda _, device, *rest: Group(device=device, close=lambda: None)  # noqa: E731
    monkeypatch.setattr(distributed, "Group", made)
    monkeypatch.setattr(process, "on_cpu", False)
    assert join("auto", place, 60.0, pytest.fail).device == torch.device("cuda", 3)
    assert cuda.chosen == [torch.device("cuda", 3)]
    uuids[:] = ["GPU-0"] * 4
    assert join("auto", place, 60.0, said.append).device == CPU
    assert said == ["2 GPUs for 4 ranks: all ranks compute on the CPU"]
    cuda.mock("is_initialized", lambda: True)
    assert process.cuda_in_use() is None


def test_gpus_are_hidden_and_threads_set_before_torch_is_imported(tmp_path) -> None:
    """OpenMP, and so MKL, reads their number once, also for the threads of Gloo."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    told = f"[os.environ.get(name) for name in {names}]"
    (tmp_path / "torch.py").write_text(f"import os\nprint({told}, flush=True)\nos._exit(7)")
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}", CUDA_VISIBLE_DEVICES="0,1")
    env = {k: v for k, v in env.items() if k != names[1]} | {names[2]: "61"}
    for words, seen in (
        ("jobkit.payload.main --device cpu --threads 3", ["", "-1", "3"]),
        ("jobkit.checks.preflight.cli --device cpu", ["", "-1", "61"]),
        ("jobkit.payload.main --device auto", ["0,1", None, str(share_of_cores(1))]),
    ):
        command = [sys.executable, "-u", "-m", *words.split()]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (7, f"{seen}\n"), done.stderr


def test_dp_has_all_gpus_the_runs_precision_and_the_names_of_the_bare_model(monkeypatch) -> None:
    """torch's parallel_apply opens autocast without a type, which is bf16 on a CPU."""
    monkeypatch.setattr(nn, "DataParallel", lambda model: nn.Sequential(OrderedDict(module=model)))
    dp = DP(RunSpec(strategy="dp", precision="fp16"), RankEnv(), CPU)
    dp.devices, model = 2, nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    dp.model = dp.wrap(model)  # computes on the CPU: nn.DataParallel passes the model through
    assert list(dp.named_parameters()) == [name for name, _ in model.named_parameters()]
    assert list(dp.named_buffers()) == [name for name, _ in model.named_buffers()]
    with torch.amp.autocast("cpu", enabled=True):
        assert dp.model(torch.ones(3, 4)).dtype == torch.float16
    FakeCuda(monkeypatch, *"abcd")
    assert [DP(RunSpec(strategy="dp"), RankEnv(), d).devices for d in (GPU, CPU)] == [4, 1]


def test_the_state_of_the_gpu_is_that_of_its_uuid(monkeypatch, tmp_path) -> None:
    FakeCuda(monkeypatch, "aa", "bb")
    monkeypatch.setattr(gpus, "_AMD_DRIVER", tmp_path / "absent")
    said = "570.1, [N/A], 700.00 W, 0"
    script(tmp_path / "nvidia-smi", f'#!/bin/sh\n[ "$4" = GPU-bb ] && echo "{said}"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    state = {"driver": "570.1", "gpu_power_limit": "700.00 W"}
    assert gpu_state(GPU) == {**state, "gpu_ecc_errors": "0"}
    assert gpu_state(CPU) == {}
    (tmp_path / "nvidia-smi").unlink()
    (tmp_path / "version").write_text("6.10.10\n")  # the kernel's driver of AMD's GPUs
    monkeypatch.setattr(gpus, "_AMD_DRIVER", tmp_path / "version")
    assert gpu_state(GPU) == {"driver": "6.10.10"}


def test_the_memory_that_the_device_says_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's context and NCCL's buffers are outside what torch counts."""
    cuda = FakeCuda(monkeypatch, "a", "b")
    cuda.mock("max_memory_allocated", lambda _: 100 * 2**20)
    cuda.mock("max_memory_reserved", lambda _: 200 * 2**20)
    cuda.mock("mem_get_info", lambda device: ((1000 - 700 * device.index) * 2**20, 1000 * 2**20))
    assert list(peak_memory_mib(GPU).values())[:4] == [100, 100, 200, 700]
    says = "CUDA error: operation not supported"
    cuda.mock("mem_get_info", Mock(side_effect=RuntimeError(says)))
    assert math.isnan(peak_memory_mib(GPU)["device_memory_mib"])
    assert math.isnan(peak_memory_mib(CPU)["device_memory_mib"])


def test_a_profiled_process_ends_as_its_profiler_needs(monkeypatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda _: 1 / 0)
    for variable, code, end in (
        ("NSYS_PROFILING_SESSION_ID", Exit.OK, SystemExit),
        ("CUDA_INJECTION64_PATH", Exit.FAILED, ZeroDivisionError),  # others may wait: at once
        ("OTHER", Exit.OK, ZeroDivisionError),
    ):
        for name in leaving._PROFILED:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, "x")
        with pytest.raises(end):
            leaving.leave(code)


def test_share_of_cores(monkeypatch) -> None:
    for cores, environ, threads in (
        (8, {}, 2),
        (2, {}, 1),
        (64, {"SLURM_CPUS_PER_TASK": "16"}, 16),
        (8, {"SLURM_CPUS_PER_TASK": "16"}, 8),  # bound to fewer than were asked for
        (64, {"SLURM_CPUS_ON_NODE": "32"}, 8),  # not bound, and half of the node is ours
        (8, {"SLURM_CPUS_ON_NODE": "32"}, 8),  # each task is bound to its own eight
        (2, {"SLURM_CPUS_ON_NODE": "4"}, 1),  # simulated nodes on a small machine
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert share_of_cores(4, environ) == threads
