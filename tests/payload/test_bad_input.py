"""Each bad input has its own clear line and exit code 2, and nothing is written."""

import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.launch import cli
from jobkit.payload import main as payload
from support.refusals import refusal
from support.rigs import ROOT, SMALL, Start, environment


def test_what_run_sh_asks_before_it_starts_anything(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for words, line in (
        ("--epoch 1", "unrecognized arguments: --epoch 1"),
        ("--dataset folder:/no/such", "/no/such: no such directory"),
        ("--spec /no/such.json", "--spec /no/such.json: not the spec.json of a run"),
        ("--strategy single", "strategy 'single' runs at 1 rank, not 2; use ddp"),
    ):
        assert line in refusal(payload.main, [*words.split(), "--check=2"], capsys)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "spec.json").write_text('{"spec": {"epoch": 1}}')
    said = refusal(payload.main, ["--spec", "spec.json", "--check"], capsys)
    assert "jobkit: error: --spec spec.json: unknown setting 'epoch'; did you mean" in said


CIFAR10 = "cifar10 is not in {tmp}/data, or corrupt there, and cannot be downloaded"
PREPARE = "run 'python -m jobkit prepare --dataset cifar10 --data-dir {tmp}/data'"


@pytest.mark.parametrize(
    ("ranks", "words", "run", "lines"),
    [
        (2, "--dataset folder:{tmp}/images", "run", ["{broken}: not a readable image"]),
        (2, "--dataset cifar10", "run", [CIFAR10, PREPARE]),
        (1, "--dataset synthetic", "file/run", ["/run is not writable: Not a dir"]),
    ],
)
def test_what_the_ranks_find_is_one_line(forge, images, tmp_path, ranks, words, run, lines) -> None:
    (tmp_path / "file").touch()
    broken = images / "train/cat/0000.png"
    broken.write_bytes(broken.read_bytes()[:60])
    nowhere = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    words = ["--data-dir", str(tmp_path / "data"), *words.format(tmp=tmp_path).split()]
    done = forge(ranks, *words, run_dir=tmp_path / run, env=nowhere, code=2)
    assert done.out.count("jobkit: error: ") == 1 and "Traceback" not in done.out
    assert all(line.format(tmp=tmp_path, broken=broken) in done.out for line in lines), done.out
    assert {path.suffix for path in (tmp_path / "data").rglob("*.*")} <= {".lock"}


def test_a_folder_of_another_run_is_told(forge: Start, images: Path) -> None:
    source = ["--dataset", f"folder:{images}"]
    first = forge(1, *source, "--epochs", "1", "--global-batch-size", "4")
    second = forge(1, *source, "--epochs", "2", run_dir=first.paths.folder, code=2)
    assert "was made for another run: epochs is 1 there and 2 here" in second.out


def test_a_dry_run_writes_nothing(forge: Start, images: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    source = ["--dataset", f"folder:{images}", "--data-dir", str(data)]
    done = forge(2, *source, "--dry-run", run_dir=run)
    assert "dry run: ready to train; logits (" in done.out
    assert "[Rank 1] host" in done.out and "[METRIC]" not in done.out
    done = forge(1, "--data-dir", str(data), "--dry-run", run_dir=run, code=2)
    assert "cifar10 is not in" in done.out
    assert not data.exists() and not run.exists()


def test_a_study_without_its_data_starts_no_run(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    words = ["--study", "strong", "--gpus", "1", "--data-dir", str(tmp_path / "data")]
    words += ["--sweep", "dataset=synthetic,cifar10"]  # one run could go, the other could not
    assert cli.main([*words, "--site", "local", "--device", "cpu"]) == 2
    said = capfd.readouterr()
    assert said.err.count("\n") == 1 and CIFAR10.format(tmp=tmp_path) in said.err
    assert "started" not in said.out and not (tmp_path / "logs").exists()


def real(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A run by run.sh itself, and torchrun."""
    line = ["bash", str(ROOT / "run.sh"), "--nproc-per-node", "1", *SMALL, *words]
    env = environment(JOBKIT_PYTHON=sys.executable, JOBKIT_DATA_DIR=str(folder))
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=300, cwd=folder)


def test_run_sh_says_last_why_a_run_cannot_go_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def model():\n    raise KeyError('layers')\n")
    done = real("--dry-run", "--model", "mine:absent", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "'absent'" in done.stderr
    done = real("--model", "mine:model", "--run-dir", "run", folder=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 1 and last == "jobkit: error: the run failed: rank 0: KeyError: 'layers'"
    )
