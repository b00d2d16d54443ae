"""Fixtures of the payload's tests: quick ranks, and real launches."""

import itertools
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jobkit.paths import RunPaths
from jobkit.spec.strategies import FACTS
from support.cuts import MODELS
from support.forks import Forks, places
from support.rigs import ROOT, RUN_SH, Result, Start, environment

MAIN = ROOT / "src" / "jobkit" / "payload" / "main.py"


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, from which --model own_models:noisy can be imported."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_models.py").write_text(MODELS)
    return folder


@pytest.fixture(scope="module")
def alone() -> Iterator[dist.ProcessGroup]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def fork_server() -> None:
    """The process from which tests fork ranks themselves. Python has one, which imports what it is
    told by the first who needs it: what others' ranks lack, each of them would import.
    """
    modules = ["torch._dynamo", "torch.distributed.pipelining", "ranks"]
    modules += ["jobkit.checks.verify.rank", "jobkit.checks.collectives"]
    files = {facts.code.partition(".")[0] for facts in FACTS.values()}
    modules += [f"jobkit.payload.strategies.{name}" for name in files]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def _forks() -> Iterator[Forks]:
    # One thread for those of Gloo too, in which PowerSGD computes: torch is imported before the
    # payload's main could say so. Tests of the same bits with it give --threads 1.
    path = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    env = environment(PYTHONPATH=path, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
    # What fully_shard and the models would import, a second each time.
    made = Forks("torch._dynamo", "torchvision.models", "jobkit.payload.run", env=env)
    yield made
    made.close()


@pytest.fixture(scope="session")
def forge(_forks: Forks, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run the payload's main at some ranks, without a launcher: forge(2, "--strategy", "ddp").

    code: with which every rank must end; None: any.
    JOBKIT_TEST_DEVICE: the device of tests that name none. Whatever the device, the same bits.
    """
    device = os.environ.get("JOBKIT_TEST_DEVICE", "")
    on_device = ["--device", device, *(["--deterministic"] * (device == "cuda"))] if device else []

    def start(
        world, *words, main=MAIN, run_dir=None, cwd=ROOT, env=None, timeout_s=900.0, code=0
    ) -> Result:
        if device == "cuda" and world > torch.cuda.device_count():
            pytest.skip(f"needs {world} GPUs")
        folder = run_dir or tmp_path_factory.mktemp("forge") / "run"
        files = tmp_path_factory.mktemp("out")
        argv = [str(main), "--data-dir", str(data_dir), *on_device, *words]
        ranks = [
            ({**(env or {}), **place}, *[files / place["RANK"]] * 2) for place in places(world)
        ]
        codes = _forks.fork([*argv, "--run-dir", str(folder)], cwd, ranks, timeout_s)
        out = "".join(file.read_text() for *_, file in ranks)
        assert code is None or codes == [code] * world, out
        return Result(codes, out, RunPaths(folder))

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
    """A small folder: source of PNG images, one colour a class."""
    from PIL import Image

    for part, at, i in itertools.product(("train", "test"), (0, 1), range(6)):
        path = tmp_path / "images" / part / ("cat", "dog")[at] / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (40 + 150 * at, 10 * i, 90)).save(path)
    return tmp_path / "images"
