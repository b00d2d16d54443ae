"""The package for C++, and the program in hpc/inference that runs it: each is built once."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jobkit.metric.reader import scan
from support.rigs import NO_BREAKDOWN, ROOT, Start, environment

pytestmark = [pytest.mark.long, pytest.mark.needs("g++", "cmake", "make")]
RUN = ("--dataset", "synthetic", "--train-samples", "32", "--test-samples", "16", *NO_BREAKDOWN)
RUN += ("--epochs", "1", "--global-batch-size", "16", "--checkpoint-every", "epoch")
RUN += ("--model", "mlp", "--hidden", "8", "--strategy", "fsdp", "--precision", "fp32")


@pytest.fixture(scope="module")
def built(forge: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    run, place = forge(2, *RUN).paths.folder, tmp_path_factory.mktemp("inference")
    env = environment(PYTHONPATH=str(ROOT / "src"), TORCHINDUCTOR_CACHE_DIR=str(place / "cache"))
    words = [sys.executable, "-m", "jobkit", "export", str(run), "--to", "aoti", "--jacobian"]
    words += ["--max-batch", "16", "--out", str(place / "net")]
    configure = ["cmake", "-S", str(ROOT / "hpc/inference"), "-B", str(place / "build")]
    configure += ["-D", f"Python3_EXECUTABLE={sys.executable}"]
    for command in (words, configure, ["cmake", "--build", str(place / "build")]):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return place / "build" / "infer", place / "net"


def infer(program: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run([program, *map(str, words)], env=plain, capture_output=True, text=True)


def read(path: Path, *shape: int) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).reshape(shape)


def test_its_lines_are_records(built: tuple[Path, Path]) -> None:
    program, net = built
    for batch in (1, 12):
        done = infer(program, net, "--batch", batch, "--iterations", 5)
        assert done.returncode == 0, done.stderr
        assert "logits: largest difference" in done.stdout
        records = list(scan(io.BytesIO(done.stdout.encode())))
        assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
        for r in records:
            assert r["images_per_s"] == pytest.approx(batch / r["step_time_ms"] * 1e3, rel=1e-3)


def test_it_classifies_images(built: tuple[Path, Path], tmp_path: Path) -> None:
    program, net = built
    images = net / "images.u8"
    expected = read(net / "expected.f32", 8, 10).argmax(1).tolist()
    (tmp_path / "five").write_bytes(images.read_bytes()[: 5 * 3072])
    (tmp_path / "many").write_bytes(images.read_bytes() * 3)  # more than one batch may have
    expected *= 3
    for path, count in ((images, 8), (tmp_path / "five", 5), (tmp_path / "many", 24)):
        done = infer(program, net, "--images", path)
        lines = [line for line in done.stdout.splitlines() if line.startswith("image ")]
        assert lines == [f"image {i}: class {c}" for i, c in enumerate(expected[:count])]


def test_the_jacobian_and_what_cannot_be_read(built: tuple[Path, Path], tmp_path: Path) -> None:
    program, net = built
    out = tmp_path / "out.f32"
    done = infer(program, net, "--images", net / "images.u8", "--jacobian", out)
    assert done.returncode == 0 and "jacobian: largest difference" in done.stdout, done.stderr
    of_first = read(net / "jacobian.f32", 10, 3, 32, 32)
    assert torch.allclose(read(out, 8, 10, 3, 32, 32)[0], of_first, rtol=1e-3, atol=1e-7)
    other = Path(shutil.copytree(net, tmp_path / "other"))
    (read(net / "expected.f32", 8, 10) + 1e-3).numpy().tofile(other / "expected.f32")
    assert infer(program, other, "--iterations", 1).returncode == 4
    shutil.copy(net / "expected.f32", other)
    (read(net / "jacobian.f32", 10, 3072) * 1.01).numpy().tofile(other / "jacobian.f32")
    assert infer(program, other, "--jacobian", tmp_path / "none.f32").returncode == 4
    assert not (tmp_path / "none.f32").exists()
    (other / "images.u8").write_bytes(b"short")
    for words in (
        (other,), (tmp_path,), (), (net, "--fast"), (net, "--batch", "17"), (net, "--jacobian"),
        (net, "--jacobian", tmp_path), (net, "--images", other / "images.u8"),
    ):  # fmt: skip
        done = infer(program, *words)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), words
        assert done.stderr.startswith("infer: error: ")
