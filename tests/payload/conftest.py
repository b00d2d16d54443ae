"""Fixtures of the payload's tests: quick ranks, and real launches."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from jobkit.paths import RunPaths
from support.rigs import ROOT, RUN_SH, Result, Start, environment, write_images


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def fork_server() -> None:
    """The process from which tests fork ranks themselves. Python has one, which imports what it is
    told by the first who needs it: what others' ranks lack, each of them would import.
    """
    modules = ["torch._dynamo", "torch.distributed.pipelining", "ranks"]
    modules += ["jobkit.checks.verify.rank", "jobkit.checks.collectives"]
    modules += [f"jobkit.payload.strategies.{name}" for name in ("ddp", "fsdp", "pipeline")]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def _forge() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "forge.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # One thread for those of Gloo too, in which PowerSGD computes: torch is imported before the
        # payload's main could say so. Tests of the same bits with it give --threads 1.
        env=environment(
            PYTHONPATH=f"{ROOT / 'src'}:{ROOT / 'tests'}", PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1"
        ),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def forge(
    _forge: subprocess.Popen[str], data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Start:
    """Run the payload's main at some ranks, without a launcher: forge(2, "--strategy", "ddp").

    JOBKIT_TEST_DEVICE: the device of tests that name none. Whatever the device, the same bits.
    """
    device = os.environ.get("JOBKIT_TEST_DEVICE", "")
    on_device = ["--device", device, *(["--deterministic"] * (device == "cuda"))] if device else []

    def start(world: int, *words: str, run_dir: Path | None = None, **request: Any) -> Result:
        if device == "cuda" and world > torch.cuda.device_count():
            pytest.skip(f"needs {world} GPUs")
        folder = run_dir or tmp_path_factory.mktemp("forge") / "run"
        out = tmp_path_factory.mktemp("out") / "rank"
        argv = ["--data-dir", str(data_dir), *on_device, *words, "--run-dir", str(folder)]
        content = {"world": world, "argv": argv, "out": str(out), **request}
        assert _forge.stdin is not None
        assert _forge.stdout is not None
        _forge.stdin.write(json.dumps(content) + "\n")
        _forge.stdin.flush()
        codes = json.loads(_forge.stdout.readline())
        texts = [Path(f"{out}.{rank}").read_text() for rank in range(world)]
        return Result(codes, "".join(texts), RunPaths(folder))

    return start


@pytest.fixture
def launch(data_dir: Path, tmp_path: Path) -> Start:
    """Run run.sh as a user does, torchrun and all: launch("--nproc-per-node", "2", ...)."""

    def start(*words: str, cwd: Path = ROOT, **extra: str) -> Result:
        folder = tmp_path / "study" / "run"
        done = subprocess.run(
            [*RUN_SH, "--data-dir", str(data_dir), *words, "--run-dir", str(folder)],
            env=environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=960,
            cwd=cwd,
        )
        return Result([done.returncode], done.stdout, RunPaths(folder))

    return start


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")
