"""Corrupt checkpoints: skipped with a warning, and no code in them is run."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobkit.paths import RunPaths
from support.cuts import RUN, actions, final, measured, same, warnings, write_models
from support.rigs import Result, Start

HOW = (*RUN, "--model", "own_models:noisy", "--strategy", "single", "--optimizer", "adamw")
NEWEST, BEFORE = 8, 4
MARK = "was-here"


class Hostile:
    """Unpickled by the book, it runs a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {MARK}",)


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def vouched(folder: Path, name: str) -> None:
    """Have the manifest vouch for a file as it is now, as whoever made it could."""
    path, content = folder / "manifest.json", (folder / name).read_bytes()
    manifest = json.loads(path.read_text())
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"][name] = entry
    path.write_text(json.dumps(manifest))


def changed(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def cut_short(folder: Path) -> str:
    path = only(folder, "*.distcp")
    path.write_bytes(path.read_bytes()[:-100])
    return f"{path.name} has "


def flip_a_bit(folder: Path) -> str:
    path = only(folder, "*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path.name} has another checksum than when it was written"


def remove_a_file(folder: Path) -> str:
    path = only(folder, "*.distcp")
    path.unlink()
    return f"{path.name}: No such file or directory"


def tear_the_manifest(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:200])
    return "manifest.json is absent or truncated"


def remove_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is absent or truncated"


def another_version(folder: Path) -> str:
    changed(folder, lambda manifest: manifest.update(v=99))
    return "manifest.json has version 99, not 1"


def leave_the_folder(folder: Path) -> str:
    entry = {"bytes": 1, "sha256": ""}
    changed(folder, lambda manifest: manifest["files"].update({"../../x": entry}))
    return "manifest.json lacks required fields"


def vouch_for_nothing(folder: Path) -> str:
    changed(folder, lambda manifest: manifest["files"].clear())
    return "which is not in manifest.json"


def lack_a_number(folder: Path) -> str:
    changed(folder, lambda manifest: manifest["progress"].pop("epoch"))
    changed(folder, lambda manifest: manifest["progress"].update(position=-3))
    return "manifest.json lacks required fields"


def hostile_index(folder: Path) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    vouched(folder, ".metadata")
    return "its index cannot be read: posix.system is not allowed in this file"


def index_of_another_kind(folder: Path) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps({"no": "index"}))
    vouched(folder, ".metadata")
    return "its index cannot be read"


def hostile_tensors(folder: Path) -> str:
    path = only(folder, "*.distcp")
    torch.save(Hostile(), path)
    content = path.read_bytes()
    # As long as before, for the reader takes each tensor from its own place in the file.
    size = json.loads((folder / "manifest.json").read_text())["files"][path.name]["bytes"]
    path.write_bytes((content * (size // len(content) + 1))[:size])
    vouched(folder, path.name)
    return "00000008-0 is corrupt"


SPOILS = [
    cut_short, flip_a_bit, remove_a_file, tear_the_manifest, remove_the_manifest, another_version,
    leave_the_folder, vouch_for_nothing, lack_a_number, hostile_index, index_of_another_kind,
    hostile_tensors,
]  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def straight(forge: Start, own: Path) -> Result:
    return forge(1, *HOW, "--checkpoint-every", "epoch", cwd=str(own))


@pytest.fixture(scope="module")
def cut(forge: Start, own: Path) -> Result:
    done = forge(1, *HOW, "--checkpoint-every", "4", cwd=str(own), env={"JOBKIT_FAULT": "kill@9"})
    assert actions(done) == [("saved", BEFORE), ("saved", NEWEST)], done.out
    return done


@pytest.fixture
def copy(cut: Result, tmp_path: Path) -> RunPaths:
    """The cut run, to be spoiled."""
    shutil.copytree(cut.paths.folder, tmp_path / "run")
    return RunPaths(tmp_path / "run")


def again(forge: Start, own: Path, copy: RunPaths) -> Result:
    words = ("--checkpoint-every", "epoch", "--attempt", "1")
    done = forge(1, *HOW, *words, run_dir=copy.folder, cwd=str(own))
    assert done.codes == [0], done.out
    assert not (own / MARK).exists()
    return done


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_one_before_is_taken(
    forge: Start, own: Path, straight: Result, copy: RunPaths, spoil: Callable[[Path], str]
) -> None:
    reason = spoil(copy.checkpoints / "00000008-0")
    done = again(forge, own, copy)
    assert actions(done, 1)[:2] == [("rejected", NEWEST), ("loaded", BEFORE)]
    assert "checkpoint 00000008-0 is corrupt, skipped: " in warnings(done, 1)
    assert reason in warnings(done, 1)
    assert same(final(straight), final(done)) == []


def test_hostile_pickles_would_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Hostile()))
    assert (tmp_path / MARK).exists()


@pytest.mark.parametrize("spoil", [flip_a_bit, hostile_tensors])
def test_none_is_sound_and_the_run_begins_anew(
    forge: Start, own: Path, straight: Result, copy: RunPaths, spoil: Callable[[Path], str]
) -> None:
    for name in ("00000004-0", "00000008-0"):
        spoil(copy.checkpoints / name)
    done = again(forge, own, copy)
    assert actions(done, 1)[:2] == [("rejected", NEWEST), ("rejected", BEFORE)]
    assert "no valid checkpoint: the run starts from scratch" in warnings(done, 1)
    assert measured(straight) == [m for m in measured(done, 2)[1:] if m]
    assert same(final(straight), final(done)) == []


def test_none_is_sound_of_those_that_the_user_named(
    forge: Start, own: Path, copy: RunPaths
) -> None:
    for name in ("00000004-0", "00000008-0"):
        cut_short(copy.checkpoints / name)
    done = forge(1, *HOW, "--resume-from", str(copy.folder), cwd=str(own))
    assert done.codes == [2]
    assert f"--resume-from: no valid checkpoint in {copy.checkpoints}" in done.out


def test_a_fault_that_one_rank_sees_is_told_to_all(forge: Start, own: Path) -> None:
    how = (*RUN, "--model", "own_models:noisy", "--strategy", "fsdp", "--checkpoint-every", "3")
    cut = forge(2, *how, cwd=str(own), env={"JOBKIT_FAULT": "raise@7:1"})
    assert actions(cut) == [("saved", 3), ("saved", 6)]
    flip = cut.paths.checkpoints / "00000006-0" / "__1_0.distcp"
    flip.write_bytes(flip.read_bytes()[::-1])
    done = forge(2, *how, "--attempt", "1", run_dir=cut.paths.folder, cwd=str(own))
    assert done.codes == [0, 0], done.out
    assert actions(done, 1)[:2] == [("rejected", 6), ("loaded", 3)]
    assert "__1_0.distcp has another checksum" in warnings(done, 1)
