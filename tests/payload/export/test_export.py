"""A run's model in files that Python reads: weights, ONNX; and what cannot be exported."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobkit.data.images import synthetic
from jobkit.errors import Exit, UsageError
from jobkit.export import cli, formats
from jobkit.export.weights import trained_model
from jobkit.payload.model import build_model
from jobkit.spec.runspec import RunSpec
from support import needs
from support.rigs import NO_BREAKDOWN, ROOT, Result, Start

RUN = ("--dataset", "synthetic", "--train-samples", "64", "--test-samples", "32", *NO_BREAKDOWN)
RUN += ("--epochs", "2", "--global-batch-size", "16", "--checkpoint-every", "epoch")
RUN += ("--precision", "fp32", "--threads", "1")


@pytest.fixture(scope="module")
def trained(forge: Start) -> Result:
    """Two ranks with batch normalisation, whose statistics differ between them."""
    return forge(2, *RUN, "--strategy", "ddp", "--model", "fast_cnn")


@pytest.fixture
def run(trained: Result, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.paths.folder, tmp_path / "run"))


@pytest.fixture
def export(monkeypatch, capsys) -> Any:
    monkeypatch.setattr(cli, "hide_gpus", lambda: None)  # of the process that runs the tests

    def call(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir(), reverse=True)


def test_the_weights_are_those_that_were_evaluated(export: Any, run: Path, trained: Result) -> None:
    code, out, _ = export(run, "--to", "state_dict")
    assert code == Exit.OK and "as state_dict" in out
    made = run / "export" / "state_dict"
    model = build_model(RunSpec(model="fast_cnn"), 10)
    model.load_state_dict(torch.load(made / "model.pt", weights_only=True))
    test = synthetic(64, 32).test
    with torch.inference_mode():
        logits = formats.Deployed(model.eval())(test.images.permute(0, 3, 1, 2).float())
    loss = F.cross_entropy(logits, test.labels).item()
    assert loss == pytest.approx(trained.records("epoch")[-1]["val_loss"], rel=1e-4)

    manifest = json.loads((made / "manifest.json").read_text())
    assert (manifest["iteration"], manifest["model"]) == (8, "fast_cnn")


def test_the_five_lines_of_the_page_load_it(tmp_path, monkeypatch) -> None:
    """In a Python without jobkit: the page's own model, and what it expects of eight images."""
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    images = formats.example_images()
    with torch.inference_mode():
        expected = formats.Deployed(model)(images.float())
    Path("images.u8").write_bytes(images.numpy().tobytes())
    formats.write(formats.Deployed(model), Path("model.pt"), "state_dict", 1024)
    page = (ROOT / "docs" / "export.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) == 6  # five, and one that calls the model
    names: dict[str, Any] = {"torch": torch, "MyModel": lambda: nn.Sequential(*model).train()}
    exec(code, names)
    assert torch.allclose(names["logits"], expected, atol=1e-5)


def test_onnx_serves_one_image_and_many(export: Any, run: Path, tmp_path: Path) -> None:
    try:
        formats.check_tools("onnx")
    except ImportError as error:
        needs.unavailable(f"{error.name} is not installed: make venv, or pip install '.[export]'")
    import onnxruntime

    code, out, err = export(run, "--to", "onnx", "--out", tmp_path / "net", "--max-batch", "16")
    assert code == Exit.OK, out + err
    net = tmp_path / "net"
    session = onnxruntime.InferenceSession(net / "model.onnx", providers=["CPUExecutionProvider"])
    pixels = formats.example_images().float().numpy()
    expected = read(net / "expected.f32", 8, 10)
    for count in (1, 8):
        (got,) = session.run(None, {"pixels": pixels[:count]})
        assert torch.allclose(torch.from_numpy(got), expected[:count], atol=1e-4)


def test_a_corrupt_checkpoint_is_skipped_and_none_is_refused(export: Any, run: Path) -> None:
    newest, older = checkpoints(run)
    for part in newest.glob("*.distcp"):
        part.write_bytes(b"x" + part.read_bytes()[1:])
    code, out, err = export(run, "--to", "state_dict")
    assert code == Exit.OK and older.name in out and f"{newest.name} is corrupt, skipped" in err
    (older / "manifest.json").unlink()
    code, _, err = export(run, "--to", "state_dict", "--out", run / "again")
    assert code == Exit.USAGE and "no sound checkpoint" in err
    assert not (run / "again").exists()


def test_bad_input_is_one_line(export: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (run / "export").mkdir()
    before = sorted(run.rglob("*"))
    for words, said in (
        ((run / "absent", "--to", "onnx"), "no such folder"),
        ((run / "export", "--to", "state_dict"), "no sound checkpoint there"),
        ((run, "--to", "state_dict", "--out", run), "exists: remove it"),
        ((run, "--to", "onnx", "--jacobian"), "of --to aoti"),
        ((run, "--to", "aoti"), "no 'no-such-compiler' on PATH"),
        ((run, "--to", "state_dict", "--model", "os:getcwd"), "the model is 'fast_cnn': leave out"),
    ):
        code, _, err = export(*words)
        assert (code, len(err.splitlines())) == (Exit.USAGE, 1) and said in err, words
    assert sorted(run.rglob("*")) == before


def test_code_of_others_is_imported_on_the_users_word_alone(export: Any, run: Path) -> None:
    for path in checkpoints(run):
        content = json.loads((path / "manifest.json").read_text())
        content["spec"]["model"] = "os:getcwd"
        (path / "manifest.json").write_text(json.dumps(content))
    code, _, err = export(run, "--to", "state_dict")
    assert code == Exit.USAGE and "say --model os:getcwd" in err
    code, _, err = export(run, "--to", "state_dict", "--model", "os:getcwd")
    assert code == Exit.USAGE and "does not fit the model os:getcwd" in err


def test_a_result_that_differs_is_not_kept(export, run, monkeypatch) -> None:
    load = formats.load
    for wrong in (1e-3, float("nan")):  # NaN is no number at all

        def other(*words: Any, by: float = wrong) -> formats.Run:
            right = load(*words)
            return lambda pixels: right(pixels) + by

        monkeypatch.setattr(formats, "load", other)
        code, out, err = export(run, "--to", "state_dict")
        assert (code, out) == (Exit.THRESHOLD, "") and "differs from the trained one" in err
    assert list((run / "export").iterdir()) == []


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        part = x.flatten(1)[:, :10]
        return part if x.sum() > 0 else -part


def test_a_model_that_branches_on_values_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the model cannot be exported: .*state_dict takes any"):
        formats.write(formats.Deployed(Branching()), tmp_path / "x.pt2", "aoti", 1024)


def test_the_package_for_cpp_has_the_numbers_of_autograd(export, run, monkeypatch) -> None:
    """What is compiled is kept instead, and run: compilers take a minute (test_inference.py)."""
    programs: dict[str, Any] = {}

    def keep(program: Any, package_path: str, inductor_configs: dict[str, Any]) -> None:
        programs[package_path] = program.module()
        Path(package_path).write_bytes(b"program")
        assert inductor_configs["cpp.dynamic_threads"] is True

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", keep)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: programs[path])
    monkeypatch.setenv("CXX", sys.executable)  # any program that is there
    code, out, err = export(run, "--to", "aoti", "--jacobian", "--max-batch", "16")
    assert code == Exit.OK, out + err
    net = run / "export" / "aoti"
    pixels = formats.example_images().float()
    model = formats.Deployed(trained_model(run, None, print).model)
    logits = read(net / "expected.f32", 8, 10)
    with torch.no_grad():
        assert torch.allclose(logits, model(pixels), atol=1e-5)
    one = pixels[:1].requires_grad_()
    rows = [torch.autograd.grad(model(one)[0, c], one)[0] for c in range(10)]
    jacobian = read(net / "jacobian.f32", 10, 3, 32, 32)
    assert torch.allclose(jacobian, torch.cat(rows), rtol=1e-3, atol=1e-6)
    whole, of_one = programs.values()
    assert whole(pixels[:3]).shape == (3, 10)  # the number of images is free
    assert torch.allclose(of_one(pixels[:1])[0], jacobian, rtol=1e-3, atol=1e-6)


def read(path: Path, *shape: int) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).reshape(shape)
