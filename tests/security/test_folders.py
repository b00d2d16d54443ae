"""Folders that others may write to: nothing in them is executed; a project's group is trusted."""

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit import permissions
from jobkit.errors import UsageError
from jobkit.launch import cli, launcher
from jobkit.launch.command import LaunchRequest
from jobkit.spec.runspec import RunSpec
from jobkit.spec.study import Plan
from support.fake_study import make_plan, whole_run
from support.hostile import in_child
from support.place import ROOT

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
ALICE, BOB, PROJECT = 54321, 54322, 54400  # users and a group without names
DRY = ["--study", "demo", "--name", "s", "--site", "local", "--gpus", "1", "--dry-run"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "project" / "logs"))
    monkeypatch.setattr("jobkit.permissions._is_private", lambda gid: False)
    made = make_plan("s", strategies=("ddp",), gpus=(1,))
    whole_run(made, next(iter(made.runs)))
    return made


def place(plan: Plan, name: str) -> Path:
    folder = plan.paths.folder
    places = {"project": folder.parent.parent, "logs": folder.parent, "study": folder}
    return places.get(name) or folder / next(iter(plan.runs))


def give_acl(path: Path) -> None:
    """Let a user besides the owner write to a folder, as setfacl -m u:54322:rwx does."""
    entries = [(1, 7, -1), (2, 7, BOB), (4, 5, -1), (16, 7, -1), (32, 5, -1)]  # tag, rights, id
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"no ACL on this file system: {error.strerror}")


@pytest.mark.parametrize(
    ("where", "change", "said"),
    [
        ("study", 0o1777, "study: everybody may write there"),
        ("run", 0o757, "run: everybody may write there"),
        ("project", 0o777, "project: everybody may write there"),
        ("logs", 0o1777, ""),
        ("run", 0o770, "note"),
        ("project", 0o2775, "note"),
        ("study", "ACL", "note"),
    ],
)
def test_who_may_write_decides_what_starts(plan, where, change, said, monkeypatch, capsys) -> None:
    """A refusal is one line before anything is written; a group is one note, in a dry run too."""
    path, started = place(plan, where), []
    path.chmod(change) if isinstance(change, int) else give_acl(path)
    monkeypatch.setattr(launcher.local, "start", lambda *_: started.append("run"))
    before, code = plan.paths.plan.stat().st_mtime_ns, 0 if said in ("", "note") else 2
    assert cli.main(DRY) == code
    out, err = capsys.readouterr()
    lines = [line for line in (out + err).splitlines() if "may write there" in line]
    assert len(lines) == bool(said) and err.count("\n") == bool(code)
    if code:
        assert f"{path}: everybody may write there" in lines[0]
        with pytest.raises(UsageError):
            launcher.launch(plan, LaunchRequest(site="local"))
        assert started == [] and plan.paths.plan.stat().st_mtime_ns == before
    elif said:
        assert f"note: {path}: its group may write there" in lines[0]
    # Only for the study's own folders is there a mode to change.
    assert ("chmod" in out + err) == (bool(code) and where in ("study", "run"))


def test_a_group_of_one_user_alone_is_nobody_else(plan: Plan, monkeypatch: Any) -> None:
    """As Debian and Red Hat make one for each user, with a umask of 002; an ACL may name others."""
    monkeypatch.setattr("jobkit.permissions._is_private", lambda gid: True)
    plan.paths.folder.chmod(0o775)
    assert permissions.check_study(plan.paths.folder) == []
    give_acl(plan.paths.folder)
    assert len(permissions.check_study(plan.paths.folder)) == 1


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def checked(folder: Path, uid: int) -> str:
    def check() -> str:
        try:
            return "".join(permissions.check_study(folder))
        except UsageError as error:
            return f"refused: {error}"

    done = in_child(check, uid)
    assert done.faults == []
    return str(done.code)


@as_root
@pytest.mark.parametrize("what", ["study", "run", "link"])
def test_the_study_of_another_user_is_refused(shared: Path, what: str) -> None:
    """Two users who share a sticky folder: who makes a name first gets no other's jobs."""
    shared.chmod(0o1777)
    study = shared / "s"
    (study / "run").mkdir(parents=True)
    for path in (study, study / "run"):
        os.chown(path, ALICE, ALICE)
    assert checked(study, ALICE) == ""
    assert "its owner, another user, may" in checked(study, BOB)
    if what == "run":
        os.chown(study / "run", BOB, BOB)
    if what == "link":
        (shared / "l").symlink_to(study)
        study = shared / "l"
        assert checked(study, ALICE) == ""  # root made it
        os.lchown(study, BOB, BOB)
    said = checked(study, ALICE)
    assert said.startswith("refused: ") == (what != "study") and "chmod" not in said


@as_root
def test_a_project_whose_folder_another_user_owns_is_one_note(shared: Path) -> None:
    """As /project/GROUP of a cluster: of the head of a group, mode 2775."""
    os.chown(shared, BOB, PROJECT)
    shared.chmod(0o2775)
    (shared / "mine").mkdir()
    os.chown(shared / "mine", ALICE, PROJECT)
    said = checked(shared / "mine" / "logs" / "s", ALICE)
    assert said.startswith(f"{shared}: its owner, another user, may write")


def test_a_folder_of_ones_own_is_closed_and_no_link(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir(mode=0o777)
    give_acl(tmp_path / "x")
    assert permissions.private_folder(tmp_path / "x").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(UsageError, match="is a link"):
        permissions.private_folder(tmp_path / "link")


def test_the_compilers_cache_is_a_folder_of_ones_own(tmp_path, monkeypatch) -> None:
    """Torch's default in /tmp anybody can make first, and leave pickles there."""
    cpu = pytest.importorskip("torch").device("cpu")
    from jobkit.payload.model import build_model
    from jobkit.payload.place import RankEnv
    from jobkit.payload.strategies.local import Single

    spec = RunSpec(strategy="single", model="mlp", device="cpu", compile=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    permissions.keep_compiler_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    Single(spec, RankEnv(), cpu).setup(build_model(spec, 10))
    own = tmp_path / f"jobkit-{os.geteuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{own}/torchinductor"
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_what_a_command_makes_is_closed_to_others(tmp_path: Path, umask: int) -> None:
    """By itself, by a process that it starts, and by a plan that is saved from Python."""
    before = os.umask(umask)
    with permissions.closed_to_others():
        (tmp_path / "a").mkdir()
        subprocess.run(["mkdir", str(tmp_path / "a" / "child")], check=True)
    paths = make_plan("new").paths
    assert os.umask(before) == umask
    folders = (tmp_path / "a", tmp_path / "a" / "child", paths.folder)
    modes = {folder.stat().st_mode & 0o777 for folder in folders}
    assert modes == {0o755 & ~umask} and paths.plan.stat().st_mode & 0o777 == 0o644 & ~umask


def test_a_folder_of_pickles_is_new(tmp_path: Path) -> None:
    for name in ("0", "7", "x", "99999999999", "\u0663"):
        (tmp_path / name).mkdir()
    assert permissions.next_folder(tmp_path) == tmp_path / "8"
    assert permissions.next_folder(tmp_path / "absent") == tmp_path / "absent" / "0"


TRAPS = ("rich", "torch", "torchvision", "submitit", "pandas", "json", "tomllib", "mine")
PYTHON = f"{sys.executable} -m jobkit"


def test_nothing_is_imported_from_the_current_folder_that_nobody_named(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in TRAPS:
        trace = tmp_path / f"imported-{name}"
        (theirs / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')\n")
    with (theirs / "mine.py").open("a") as file:
        file.write("import json, torch\nfrom torch import nn\n")
        file.write("def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))\n")
    env = {**os.environ, "JOBKIT_PYTHON": sys.executable}
    for words, code, found in (
        (f"{PYTHON} status", 2, []),
        (f"{PYTHON} collect nosuch", 2, []),
        (f"bash {ROOT}/run.sh --check --dataset synthetic", 0, []),
        (f"{PYTHON} memory --model mine:make --strategy ddp --gpus 2", 0, ["mine"]),
    ):
        done = subprocess.run(words.split(), cwd=theirs, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert sorted(p.name.removeprefix("imported-") for p in tmp_path.glob("imp*")) == found
