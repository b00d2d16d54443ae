"""How a GPU is told to compute, and which random numbers each rank draws."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobkit.drill import cli
from jobkit.drill.faults import REFERENCE
from jobkit.payload import run
from jobkit.payload.device import configure, recorded, resolved, seed_rank, set_environment
from jobkit.payload.place import RankEnv
from jobkit.payload.report import Reporter
from jobkit.spec.runspec import RunSpec
from support.fake_cuda import GPU

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    for name in ("allow_tf32", "benchmark", "deterministic"):
        monkeypatch.setattr(cudnn, name, getattr(cudnn, name))
    tf32 = matmul.allow_tf32
    with torch.random.fork_rng([]):
        yield
    matmul.allow_tf32 = tf32
    torch.use_deterministic_algorithms(False)


def flags() -> tuple[bool, ...]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    tf32 = (cudnn.allow_tf32, matmul.allow_tf32)
    return *tf32, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("fp32", "deterministic"), [("tf32", False), ("ieee", True)])
def test_every_switch_is_set_and_recorded(before: bool, fp32: str, deterministic: bool) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.allow_tf32 = matmul.allow_tf32 = cudnn.benchmark = cudnn.deterministic = before
    configure(RunSpec(fp32=fp32, deterministic=deterministic), GPU)
    tf32, fast = fp32 == "tf32", not deterministic
    assert flags() == (tf32, tf32, fast, deterministic, deterministic)
    found = recorded(GPU)
    said = {"cudnn_benchmark": str(fast).lower(), "deterministic": str(deterministic).lower()}
    assert found == {**said, "fp32": fp32, "cudnn": str(cudnn.version())}
    matmul.fp32_precision = cudnn.conv.fp32_precision = "ieee" if tf32 else "tf32"
    assert recorded(GPU)["fp32"] == matmul.fp32_precision
    cudnn.allow_tf32, matmul.allow_tf32 = True, False
    assert recorded(GPU)["fp32"] == "mixed"


def test_what_the_user_set_is_kept_and_on_the_cpu_nothing_is_set_or_recorded(monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    environ, before, cpu = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, flags(), torch.device("cpu")
    for device, algorithm in (("cpu", None), ("cuda", "Ring")):
        set_environment(spec := RunSpec(fp32="tf32", deterministic=True, device=device), environ)
        assert environ.get("NCCL_ALGO") == algorithm
    assert recorded(GPU)["cublas_workspace_config"] == environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    configure(spec, cpu)
    assert (flags(), recorded(cpu)) == (before, {})


def test_the_variables_are_there_before_the_first_call_of_cuda(monkeypatch) -> None:
    seen: list[dict[str, str]] = []

    def first_call() -> int:
        seen.append({name: os.environ[name] for name in VARIABLES if name in os.environ})
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "device_count", first_call)
    spec = RunSpec(deterministic=True, device="cuda")
    job = run.RankJob(spec=spec, place=RankEnv(), paths=None)
    with pytest.raises(KeyboardInterrupt):
        run.set_up(job, Reporter(None, 0, 0))
    torch.distributed.destroy_process_group()
    assert seen == [VARIABLES]
    for name in VARIABLES:
        monkeypatch.delenv(name)


def decided(device: torch.device, others: bool = True, **given: Any) -> tuple[str, str]:
    """Precision and fp32 on a rank; others: what the other rank's GPU has."""
    group = SimpleNamespace(device=device, gather=lambda own: [own, others])
    spec = resolved(RunSpec(**given), group)  # type: ignore[arg-type]
    assert resolved(spec, group) == spec  # type: ignore[arg-type]
    return spec.precision, spec.fp32


def test_a_gpu_is_fast_by_default_and_a_cpu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    cpu, strict = torch.device("cpu"), ("fp32", "ieee")
    assert decided(GPU) == ("bf16", "tf32")
    assert decided(GPU, others=False) == ("fp32", "tf32")  # all ranks compute alike
    assert decided(GPU, deterministic=True) == strict
    assert decided(cpu) == strict
    assert decided(GPU, precision="fp16", fp32="ieee") == ("fp16", "ieee")
    assert decided(cpu, precision="bf16") == ("bf16", "ieee")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert decided(GPU)[0] == "fp32"


@pytest.mark.parametrize(("device", "deterministic"), [("cuda", True), ("cpu", False)])
def test_a_drill_on_gpus_is_deterministic(device: str, deterministic: bool) -> None:
    args = cli.parser().parse_args(["--device", device])
    spec = cli.program_of(args, []).spec({"nodes": 1, "ranks_per_node": 2}, REFERENCE)
    assert isinstance(spec, RunSpec) and spec.deterministic is deterministic


def drawn(rank: int, seed: int = 0, iteration: int = 0) -> tuple[float, ...]:
    """What a rank draws first, after all have seeded alike."""
    torch.manual_seed(seed)
    seed_rank(seed, rank, iteration=iteration)
    return tuple(torch.rand(4).tolist())


def test_no_two_ranks_repeats_or_resumed_runs_draw_the_same() -> None:
    """A sum of seed and rank would be the same for two of these."""
    found = [drawn(r, seed, at) for r in range(4) for seed in range(3) for at in (0, 8, 16)]
    assert len(set(found)) == len(found)
    assert drawn(3, 1, 8) == drawn(3, 1, 8)
    first = drawn(0, seed=5)
    torch.manual_seed(5)
    assert first == tuple(torch.rand(4).tolist())  # as a run on one rank does
