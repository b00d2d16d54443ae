"""Each bad input has its own clear line and exit code 2, and nothing is written."""

from pathlib import Path

from jobkit.payload import main as payload
from support.rigs import Start

SPEC = [
    ("[]", "not the spec.json of a run"),
    ('{"spec": {"epoch": 1}}', "unknown setting 'epoch'; did you mean 'epochs'?"),
    ('{"spec": {"epochs": "1"}}', "epochs = '1': must be a whole number"),
]


def test_what_run_sh_asks_before_it_starts_anything(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for words, line in (
        ("--strategy ddpp", "unknown strategy 'ddpp'; did you mean 'ddp'?"),
        ("--epoch 1", "unrecognized arguments: --epoch 1"),
        ("--dataset folder:/no/such", "/no/such: no such directory"),
        ("--spec /no/such.json", "--spec /no/such.json: not the spec.json of a run"),
        ("--strategy single", "strategy 'single' runs at 1 rank, not 2; use ddp"),
    ):
        try:
            code = payload.main([*words.split(), "--check=2"])
        except SystemExit as end:  # argparse's way
            code = end.code
        error = capsys.readouterr().err
        assert code == 2 and line in error and error.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
    for content, line in SPEC:
        (tmp_path / "spec.json").write_text(content)
        assert payload.main(["--spec", "spec.json", "--check"]) == 2
        assert f"jobkit: error: --spec spec.json: {line}" in capsys.readouterr().err


def test_a_broken_image_is_named(forge: Start, images: Path, tmp_path: Path) -> None:
    path = images / "train/cat/0000.png"
    path.write_bytes(path.read_bytes()[:60])
    words = ["--dataset", f"folder:{images}", "--data-dir", str(tmp_path / "data")]
    done = forge(2, *words)
    assert done.codes == [2, 2]
    errors = [at for at in done.out.splitlines() if at.startswith("jobkit: error: ")]
    assert errors == [f"jobkit: error: {path}: not a readable image"]
    assert "Traceback" not in done.out
    assert not list((tmp_path / "data").rglob("*.pt"))


def test_no_network_and_no_data_name_the_command_that_helps(forge: Start, tmp_path: Path) -> None:
    nowhere = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    done = forge(2, "--data-dir", str(tmp_path / "data"), env=nowhere)
    assert done.codes == [2, 2]
    (line,) = [at for at in done.out.splitlines() if at.startswith("jobkit: error: ")]
    assert f"cifar10 is not in {tmp_path}/data, or corrupt there, and cannot be downloaded" in line
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


def test_a_log_folder_in_a_files_place_is_told(forge: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["--dataset", "synthetic", "--train-samples", "8", "--test-samples", "4"]
    done = forge(1, *words, run_dir=tmp_path / "file" / "run")
    assert done.codes == [2]
    assert f"jobkit: error: {tmp_path}/file/run is not writable: Not a directory" in done.out
    assert "Traceback" not in done.out


def test_a_dry_run_writes_nothing(forge: Start, images: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    source = ["--dataset", f"folder:{images}", "--data-dir", str(data)]
    done = forge(2, *source, "--dry-run", run_dir=tmp_path / "run")
    assert done.codes == [0, 0], done.out
    assert "dry run: ready to train; logits (" in done.out
    assert "[Rank 1] host" in done.out
    assert "[METRIC]" not in done.out
    done = forge(1, "--data-dir", str(data), "--dry-run", run_dir=tmp_path / "run")
    assert done.codes == [2]
    assert "cifar10 is not in" in done.out
    assert not data.exists()
    assert not (tmp_path / "run").exists()
