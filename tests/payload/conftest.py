"""Helpers of the payload's tests: quick ranks, real launches, records, small images."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobkit.metric import Record, merge_parts, read_file
from jobkit.paths import RunPaths, read_json

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--dataset", "synthetic", "--train-samples", "512", "--test-samples", "200")


@dataclass
class Result:
    """What a run left."""

    codes: list[int | None]
    out: str  # of all ranks, one after the other
    paths: RunPaths

    def records(self, kind: str, attempt: int = 0) -> list[Record]:
        path = self.paths.metrics(attempt)
        if not path.exists():
            return []
        with path.open("rb") as stream:
            found = list(read_file(stream))
        assert all(isinstance(r, dict) for r in found), found
        return [r for r in found if isinstance(r, dict) and r["kind"] == kind]

    def record(self, kind: str) -> Record:
        """The one record of a kind, its parts joined."""
        found = self.records(kind)
        assert found, f"no {kind} in {self.paths.folder}:\n{self.out}"
        return merge_parts(found)

    def curve(self) -> list[float]:
        """Training loss, validation loss and accuracy of each epoch."""
        names = ("train_loss", "val_loss", "val_accuracy")
        return [r[name] for r in self.records("epoch") for name in names]

    @property
    def outcome(self) -> dict[str, Any] | None:
        return read_json(self.paths.outcome(0))


Start = Callable[..., Result]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a started process: the tests' Python first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **extra}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def _forge() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forge.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(ROOT / "src"), PYTHONUNBUFFERED="1"),
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
    """Run the payload's main at some ranks, without a launcher: forge(2, "--strategy", "ddp")."""

    def start(world: int, *words: str, run_dir: Path | None = None, **request: Any) -> Result:
        folder = run_dir or tmp_path_factory.mktemp("forge") / "run"
        out = tmp_path_factory.mktemp("out") / "rank"
        argv = ["--data-dir", str(data_dir), *words, "--run-dir", str(folder)]
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
            ["bash", str(ROOT / "run.sh"), "--data-dir", str(data_dir), *words]
            + ["--run-dir", str(folder)],
            env=environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            cwd=cwd,
        )
        return Result([done.returncode], done.stdout, RunPaths(folder))

    return start


def write_images(root: Path, per_class: int = 6, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """A small folder: source of PNG images, one colour a class."""
    from PIL import Image

    for part in ("train", "test"):
        for at, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(per_class):
                colour = (40 + 150 * at, 10 * i, 90)
                Image.new("RGB", (32, 32), colour).save(folder / f"{i:04}.png")
    return root


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")
