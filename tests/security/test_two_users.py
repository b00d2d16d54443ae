"""Two real users in one folder: what the one left there is not executed or shown by the other."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobkit.analysis.cli import collect_main
from jobkit.launch.cli import main as launch
from jobkit.launch.status import main as status
from jobkit.paths import cache_root
from jobkit.permissions import keep_compiler_cache
from support.fake_study import make_plan
from support.hostile import SECRET, in_child

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two users")
ALICE, BOB = 54321, 54322
DRY = ["--gpus", "1", "--dry-run", "--name", "x"]
PLANTED = 'command = ["touch", "pwned"]\nsetup = ["touch pwned"]\n'


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of both, as /tmp is one, which is the current one; and a home of Alice's alone."""
    folder = Path(tempfile.mkdtemp(prefix="both-", dir="/tmp"))
    folder.chmod(0o1777)
    (folder / "home").mkdir(mode=0o700)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JOBKIT_LOGS", str(folder / "home" / "logs"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    # A user without a name or a home, as some containers have.
    for name in ("TORCHINDUCTOR_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    make_plan("private", strategies=("ddp",), gpus=(1,), settings={"data_dir": f"/{SECRET}"})
    for main in (status, collect_main):  # they import what others may not be able to read
        main(["private"])
    launch(["--study", "demo", "--site", "local", *DRY])
    for path in (folder / "home", *(folder / "home").rglob("*")):
        os.chown(path, ALICE, ALICE)
    yield folder
    shutil.rmtree(folder)


def plant_file(place: Path) -> None:
    for name in ("mine", "demo"):
        (place / name).write_text(PLANTED)


def plant_folder(place: Path) -> None:
    (place / f"jobkit-{ALICE}").mkdir(mode=0o777)


def plant_links(place: Path) -> None:
    """A study whose plan and figures lead to files of Alice's."""
    study = place / "theirs"
    study.mkdir(mode=0o777)
    study.chmod(0o777)
    (study / "train.log").write_text("x\n")
    (study / "plan.json").symlink_to(place / "home" / "logs" / "private" / "plan.json")


def compile_cache() -> str:
    keep_compiler_cache()
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


OF_SITE = ["--study", "demo", "--site"]
ATTACKS: list[tuple[Callable[[Path], None], Callable[[], object], object, str]] = [
    (plant_file, lambda: launch([*OF_SITE, "mine", *DRY]), 2, "no site 'mine'"),
    (plant_file, lambda: launch([*OF_SITE, "local", *DRY]), 0, "runs would start"),
    (plant_folder, compile_cache, None, "somebody else's, or a file: remove it"),
    (plant_folder, cache_root, None, "~/.cache: there is no home: set HOME"),
    (plant_file, lambda: status(["private"]), 0, "1 missing"),
    (plant_file, lambda: collect_main(["private"]), 3, "0 of 1 runs ok"),
    (plant_links, lambda: status(["./theirs"]), 2, "not a plan"),
    (plant_links, lambda: collect_main(["./theirs"]), 2, "--out DIR"),
    (plant_links, lambda: collect_main(["./theirs", "--out", "home/mine"]), 2, "not a plan"),
]


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_what_another_user_left_is_neither_executed_nor_shown(place: Path, number: int) -> None:
    plant, act, code, words = ATTACKS[number]
    assert in_child(lambda: plant(place), BOB).faults == []
    done = in_child(act, ALICE)
    assert (done.code, words in done.out + done.error) == (code, True), done
    assert "touch" not in done.started and SECRET not in done.out + done.error
    assert not (place / "pwned").exists()
    shown = [p for p in place.glob("theirs/*") if p.is_file() and not p.is_symlink()]
    assert not any(SECRET in path.read_text() for path in shown)
