"""Each bad input has its own clear line and exit code 2, and nothing is written."""

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from support.rigs import RUN_SH, Start, environment

Spoil = Callable[[Path], str]


def tar_of(folder: Path) -> Path:
    path = folder.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname="some/where")
    return path


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--strategy", "ddpp"], "unknown strategy 'ddpp'; did you mean 'ddp'?"),
        (["--model", "ccn"], "unknown model 'ccn'; did you mean 'cnn'?"),
        (["--dataset", "cifar"], "unknown dataset 'cifar'; did you mean 'cifar10'?"),
        (["--epochs", "0"], "must be a whole number, 1 or more"),
        (["--epochs"], "expected one argument"),
        (["--epoch", "1"], "unrecognized arguments: --epoch 1"),
        (["--dataset", "folder:/no/such"], "/no/such: no such directory or .tar of images"),
        (["--spec", "/no/such.json"], "--spec /no/such.json: not the spec.json of a run"),
        (["--lr", "nan"], "must be a number, 0.0 or more"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path: Path, words: list[str], line: str) -> None:
    done = subprocess.run(
        [*RUN_SH, *words, "--run-dir", str(tmp_path / "run")],
        env=environment(JOBKIT_DATA_DIR=str(tmp_path / "data")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert line in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def empty_image(images: Path) -> str:
    (images / "test/dog/0001.png").write_bytes(b"")
    return "test/dog/0001.png: not a readable image"


def torn_image(images: Path) -> str:
    path = images / "train/cat/0000.png"
    path.write_bytes(path.read_bytes()[:60])
    return "train/cat/0000.png: not a readable image"


def other_file(images: Path) -> str:
    (images / "train/dog/notes.txt").write_text("see below")
    return "train/dog/notes.txt: not a readable image"


@pytest.mark.parametrize("spoil", [empty_image, torn_image, other_file])
@pytest.mark.parametrize("in_tar", [False, True])
def test_a_broken_image_is_named(
    forge: Start, images: Path, tmp_path: Path, spoil: Spoil, in_tar: bool
) -> None:
    line = spoil(images)
    source = tar_of(images) if in_tar else images
    done = forge(1, "--dataset", f"folder:{source}", "--data-dir", str(tmp_path / "data"))
    assert done.codes == [2]
    errors = [at for at in done.out.splitlines() if at.startswith("jobkit: error: ")]
    assert errors == [f"jobkit: error: {source}/{line}"]
    assert "Traceback" not in done.out
    assert not list((tmp_path / "data").rglob("*_images"))


def cut_in_an_image(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:20_000])
    return f"{path}: the .tar is corrupt: "


def cut_at_a_header(path: Path) -> str:
    with tarfile.open(path) as tar:
        last = max(member.offset for member in tar)
    path.write_bytes(path.read_bytes()[: last + 100])
    return f"{path}: the .tar is corrupt: unexpected end of data"


def one_class_less(path: Path) -> str:
    with tarfile.open(path, "a") as tar:
        tar.add(__file__, arcname="test/horse/0001.png")
    return f"{path}: class folders differ: horse only in test/"


@pytest.mark.parametrize("spoil", [cut_in_an_image, cut_at_a_header, one_class_less])
def test_a_broken_tar_is_named(forge: Start, images: Path, tmp_path: Path, spoil: Spoil) -> None:
    path = tar_of(images)
    line = spoil(path)
    done = forge(2, "--dataset", f"folder:{path}", "--data-dir", str(tmp_path / "data"))
    assert done.codes == [2, 2]
    assert done.out.count(f"jobkit: error: {line}") == 1, done.out
    assert "Traceback" not in done.out


def test_no_network_and_no_data_name_the_command_that_helps(forge: Start, tmp_path: Path) -> None:
    nowhere = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    done = forge(2, "--data-dir", str(tmp_path / "data"), env=nowhere)
    assert done.codes == [2, 2]
    (line,) = [at for at in done.out.splitlines() if at.startswith("jobkit: error: ")]
    assert f"cifar10 is not in {tmp_path}/data and cannot be downloaded" in line
    assert "run 'python -m jobkit prepare --dataset cifar10 --data-dir " in line
    assert "Traceback" not in done.out
    assert not list((tmp_path / "data").rglob("*.gz*"))


def test_too_few_samples_and_a_wrong_folder_are_told(forge: Start, images: Path) -> None:
    source = ["--dataset", f"folder:{images}"]
    done = forge(1, *source, "--train-samples", "13")
    assert done.codes == [2]
    assert "jobkit: error: --train-samples 13: there are only 12" in done.out
    first = forge(1, *source, "--epochs", "1", "--global-batch-size", "4")
    assert first.codes == [0], first.out
    second = forge(1, *source, "--epochs", "2", run_dir=first.paths.folder)
    assert second.codes == [2]
    assert "was made for another run: epochs is 1 there and 2 here" in second.out


def test_a_spec_that_is_none_or_of_another_version_is_told(forge: Start, tmp_path: Path) -> None:
    for content, line in (
        ("[]", "not the spec.json of a run"),
        ('{"spec": {"epoch": 1}}', "unknown setting 'epoch'; did you mean 'epochs'?"),
        ('{"spec": {"epochs": "1"}}', "epochs = '1': must be a whole number"),
    ):
        (tmp_path / "spec.json").write_text(content)
        done = forge(1, "--spec", str(tmp_path / "spec.json"))
        assert done.codes == [2]
        assert f"jobkit: error: --spec {tmp_path}/spec.json: {line}" in done.out


def test_a_log_folder_in_a_files_place_is_told(forge: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["--dataset", "synthetic", "--train-samples", "8", "--test-samples", "4"]
    done = forge(1, *words, run_dir=tmp_path / "file" / "run")
    assert done.codes == [2]
    assert f"jobkit: error: {tmp_path}/file/run is not writable: Not a directory" in done.out
    assert "Traceback" not in done.out


def test_a_dry_run_writes_nothing(forge: Start, images: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for world in (1, 2):
        source = ["--dataset", f"folder:{images}", "--data-dir", str(data)]
        done = forge(world, *source, "--dry-run", run_dir=tmp_path / "run")
        assert done.codes == [0] * world, done.out
        assert "dry run: ready to train; logits (" in done.out
        assert f"[Rank {world - 1}] host" in done.out
        assert "[METRIC]" not in done.out
    done = forge(1, "--data-dir", str(data), "--dry-run", run_dir=tmp_path / "run")
    assert done.codes == [2]
    assert "cifar10 is not in" in done.out
    assert not data.exists()
    assert not (tmp_path / "run").exists()
