"""How many GPUs are here, from stubs of the vendors' commands and their variables."""

import subprocess
import sys
from pathlib import Path

from jobkit import gpus
from jobkit.gpus import count_gpus
from support.place import script

NVIDIA = "GPU 0: NVIDIA H100 (UUID: GPU-a)\nGPU 1: NVIDIA H100 (UUID: GPU-b)\n"
MIG = "GPU 0: NVIDIA A100 (UUID: GPU-a)\n" + "".join(
    f"  MIG 3g.20gb     Device  {i}: (UUID: MIG-{i})\n" for i in range(2)
)
AMD_SMI = "GPU: 0\n    BDF: 0000:c1:00.0\n    UUID: x\n\nGPU: 1\n    BDF: 0000:c6:00.0\n"
ROCM_SMI = (
    "==== ROCm ====\nGPU[0]\t\t: Device Name: MI250\nGPU[0]\t\t: Device ID: 0x7\nGPU[1]\t: x\n"
)
CUDA, HIP, ROCR = (f"{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ROCR"))


def test_gpus_that_are_visible(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, text, variables, count in (
        ("nvidia-smi", NVIDIA, {}, 2),
        ("nvidia-smi", NVIDIA, {CUDA: "GPU-b, GPU-a"}, 2),
        ("nvidia-smi", NVIDIA, {CUDA: ""}, 0),
        ("nvidia-smi", NVIDIA, {CUDA: "1,-1,0"}, 1),
        ("nvidia-smi", MIG, {}, 1),
        ("nvidia-smi", MIG, {CUDA: "MIG-0,MIG-1"}, 1),
        ("nvidia-smi", "No devices were found\n", {}, 0),
        ("amd-smi", AMD_SMI, {}, 2),
        ("rocm-smi", ROCM_SMI, {}, 2),
        ("amd-smi", AMD_SMI, {HIP: "1"}, 1),
        ("amd-smi", AMD_SMI, {ROCR: "1"}, 1),
        ("amd-smi", AMD_SMI, {CUDA: "1"}, 1),
    ):
        command = script(tmp_path / name, f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        case = f"{name} {text} {variables}"
        assert count_gpus(variables) == count, case
        command.write_text("no program")
        assert count_gpus(variables) == 0
        command.unlink()
    script(tmp_path / "nvidia-smi", f"#!/bin/sh\ncat <<'END'\n{NVIDIA}END\n")
    monkeypatch.delenv(CUDA, raising=False)
    assert subprocess.check_output([sys.executable, "-m", "jobkit.gpus"]) == b"2\n"  # gpu-check.sh


def test_miopen_has_a_folder_for_each_rank(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpus, "_AMD_DEVICE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus.prepare_rocm(1, found := dict[str, str]())
    folder = Path(found["MIOPEN_USER_DB_PATH"])
    assert folder.is_relative_to(tmp_path) and folder.name.endswith("-1")
