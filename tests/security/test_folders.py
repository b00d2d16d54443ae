"""Folders that others may write to: nothing in them is executed."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobkit.errors import UsageError
from jobkit.launch import launcher
from jobkit.launch.request import LaunchRequest
from jobkit.permissions import check_study, next_folder, own_folder
from jobkit.spec.plan import Plan
from support.fake_study import make_plan, whole_run

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
STRANGER = 65534
PLACES = ["STUDY", "STUDY/.submitit", "STUDY/RUN", "STUDY/RUN/attempts", "LOGS", "LOGS/.."]
FILES = ["STUDY/plan.json", "STUDY/RUN/site.sh", "STUDY/.submitit/7_submitted.pkl"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A study with a run, in folders of one's own; a launch would start nothing."""
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "mine" / "logs"))
    monkeypatch.setattr("jobkit.permissions._is_private", lambda gid: False)
    made = make_plan("s", strategies=("ddp",), gpus=(1,))
    whole_run(made, next(iter(made.runs)))
    for name in FILES:
        path = place(made, name)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return made


def place(plan: Plan, name: str) -> Path:
    run, logs = next(iter(plan.runs)), plan.paths.folder.parent
    return Path(name.replace("STUDY", "LOGS/s").replace("RUN", run).replace("LOGS", str(logs)))


def refused(plan: Plan, monkeypatch: pytest.MonkeyPatch, **request: bool) -> str:
    """Why a launch is refused; it must not start a run, nor write anything."""
    started: list[str] = []
    monkeypatch.setattr(launcher, "_start_here", lambda *_: started.append("run"))
    before = plan.paths.plan.stat().st_mtime_ns
    with pytest.raises(UsageError) as error:
        launcher.launch(plan, LaunchRequest(site="local", only="ok", **request))
    assert started == [] and plan.paths.plan.stat().st_mtime_ns == before
    return str(error.value)


@pytest.mark.parametrize("name", [*PLACES, *FILES])
def test_what_everybody_may_write_to_is_not_executed(
    plan: Plan, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(plan, name).chmod(0o777)
    assert "world-writable" in (said := refused(plan, monkeypatch)) and "chmod" in said
    assert "world-writable" in refused(plan, monkeypatch, trust_group=True)


@pytest.mark.parametrize("name", [*PLACES, *FILES])
def test_what_a_group_may_write_to_is_executed_only_where_it_is_trusted(
    plan: Plan, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(plan, name).chmod(0o775)
    assert "--trust-group" in refused(plan, monkeypatch)
    (note,) = check_study(plan.paths.folder, trust_group=True)
    assert "writable by its group" in note


@root_only
@pytest.mark.parametrize("name", [*PLACES, *FILES])
def test_what_a_stranger_owns_is_not_executed(
    plan: Plan, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(place(plan, name), STRANGER, STRANGER)
    assert "its owner, who is somebody else" in refused(plan, monkeypatch)


@root_only
def test_a_link_of_a_strangers_on_the_way_is_not_followed(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o1777)
    link = shared / "logs"
    link.symlink_to(plan.paths.folder.parent)
    assert check_study(link / "s") == []
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(UsageError, match="somebody else"):
        check_study(link / "s")


def test_what_a_link_leads_through_counts_too(tmp_path: Path, plan: Plan) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    (open_folder / "logs").symlink_to(plan.paths.folder.parent)
    (tmp_path / "logs").symlink_to(open_folder / "logs")
    assert check_study(tmp_path / "logs" / "s") == []
    open_folder.chmod(0o777)
    with pytest.raises(UsageError, match="world-writable"):
        check_study(tmp_path / "logs" / "s")


def test_folders_of_ones_own_below_a_sticky_one_are_fine(plan: Plan) -> None:
    plan.paths.folder.parent.parent.chmod(0o1777)
    assert check_study(plan.paths.folder) == []
    assert check_study(plan.paths.folder.with_name("new")) == []


def test_the_group_of_one_user_alone_is_nobody_else(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian and Red Hat make one for each user, with a umask of 002."""
    monkeypatch.setattr("jobkit.permissions._is_private", lambda gid: True)
    plan.paths.folder.chmod(0o775)
    assert check_study(plan.paths.folder) == []


class Trap:
    """A pickle that makes a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("folder", [".submitit", ".submitit/0"])
def test_no_pickle_that_lay_in_a_study_is_unpickled(
    plan: Plan, folder: str, tmp_path: Path
) -> None:
    """submitit reads PID_0_result.pkl: whoever hands over a study can leave one for every pid."""
    left, trace = plan.paths.folder / folder, tmp_path / "unpickled"
    left.mkdir(exist_ok=True, parents=True)
    content = pickle.dumps(("success", Trap(trace)))
    probe = subprocess.Popen(["true"])
    probe.wait()
    for pid in range(probe.pid, probe.pid + 3000):
        (left / f"{pid}_0_result.pkl").write_bytes(content)
    code = (
        "import sys, jobkit.launch.local.driver as d\n"
        "from jobkit.launch.command import Order\n"
        "d.local_command = lambda *a: ['false']\n"
        "d.drive(Order(folder=sys.argv[1], run_ids=sys.argv[2:]))\n"
    )
    words = [sys.executable, "-c", code, str(plan.paths.folder), *plan.runs]
    subprocess.run(words, timeout=300, check=True, stdout=subprocess.DEVNULL)
    assert (plan.paths.run(next(iter(plan.runs))).job).exists()  # it ran
    assert not trace.exists()


def test_a_folder_of_pickles_is_new(tmp_path: Path) -> None:
    for name in ("0", "7", "x", "99999999999", "\u0663"):
        (tmp_path / name).mkdir()
    assert next_folder(tmp_path) == tmp_path / "8"
    assert next_folder(tmp_path / "absent") == tmp_path / "absent" / "0"


@root_only
def test_a_folder_of_a_strangers_is_not_taken_as_ones_own(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    os.chown(tmp_path / "x", STRANGER, STRANGER)
    with pytest.raises(UsageError, match="somebody else"):
        own_folder(tmp_path / "x")
