"""How many GPUs are here, from stubs of the vendors' commands and their variables."""

import os
from pathlib import Path

import pytest

from jobkit.gpus import count_gpus, lendable_gpus

NVIDIA = "GPU 0: NVIDIA H100 (UUID: GPU-a)\nGPU 1: NVIDIA H100 (UUID: GPU-b)\n"
MIG = "GPU 0: NVIDIA A100 (UUID: GPU-a)\n" + "".join(
    f"  MIG 3g.20gb     Device  {i}: (UUID: MIG-{i})\n" for i in range(2)
)
AMD_SMI = "GPU: 0\n    BDF: 0000:c1:00.0\n    UUID: x\n\nGPU: 1\n    BDF: 0000:c6:00.0\n"
ROCM_SMI = (
    "==== ROCm ====\nGPU[0]\t\t: Device Name: MI250\nGPU[0]\t\t: Device ID: 0x740c\nGPU[1]\t: x\n"
)


def stub(folder: Path, name: str, text: str, code: int = 0) -> None:
    """A command on PATH that prints a text."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "variables", "count"),
    [
        ("nvidia-smi", NVIDIA, {}, 2),
        ("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, 2),
        ("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        ("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, 1),
        ("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
        ("nvidia-smi", MIG, {}, 1),
        ("nvidia-smi", MIG, {"CUDA_VISIBLE_DEVICES": "MIG-0,MIG-1"}, 1),
        ("nvidia-smi", "No devices were found\n", {}, 0),
        ("amd-smi", AMD_SMI, {}, 2),
        ("rocm-smi", ROCM_SMI, {}, 2),
        ("amd-smi", AMD_SMI, {"HIP_VISIBLE_DEVICES": "1"}, 1),
        ("amd-smi", AMD_SMI, {"ROCR_VISIBLE_DEVICES": "0"}, 1),
        ("amd-smi", AMD_SMI, {"CUDA_VISIBLE_DEVICES": "0"}, 1),
    ],
)
def test_gpus_that_a_process_would_see(
    commands: Path, name: str, text: str, variables: dict[str, str], count: int
) -> None:
    stub(commands, name, text)
    assert count_gpus(variables) == count


def test_a_command_that_hangs_or_is_absent_counts_none(commands: Path) -> None:
    (commands / "nvidia-smi").write_text("no program")
    assert count_gpus(os.environ) == 0


@pytest.mark.parametrize(
    ("name", "text", "variables", "found"),
    [
        ("nvidia-smi", NVIDIA, {}, ("CUDA_VISIBLE_DEVICES", ["0", "1"])),
        (
            *("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": "GPU-b, GPU-a"}),
            ("CUDA_VISIBLE_DEVICES", ["GPU-b", "GPU-a"]),
        ),
        ("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ("CUDA_VISIBLE_DEVICES", ["1"])),
        ("nvidia-smi", NVIDIA, {"CUDA_VISIBLE_DEVICES": ""}, ("", [])),
        ("amd-smi", AMD_SMI, {}, ("HIP_VISIBLE_DEVICES", ["0", "1"])),
        ("amd-smi", AMD_SMI, {"ROCR_VISIBLE_DEVICES": "1"}, ("HIP_VISIBLE_DEVICES", ["0"])),
        ("amd-smi", AMD_SMI, {"CUDA_VISIBLE_DEVICES": "1"}, ("CUDA_VISIBLE_DEVICES", ["1"])),
        ("nvidia-smi", "No devices were found\n", {}, ("", [])),
    ],
)
def test_gpus_that_can_be_shared_out(
    commands: Path,
    name: str,
    text: str,
    variables: dict[str, str],
    found: tuple[str, list[str]],
) -> None:
    stub(commands, name, text)
    assert lendable_gpus(variables) == found
