"""A study of which Slurm took a part, for the tests of how the rest is submitted."""

from pathlib import Path

import pytest

from jobkit.launch.request import LaunchRequest
from jobkit.launch.site import Site
from jobkit.launch.slurm import rest as rest_module
from jobkit.launch.slurm.rest import Rest
from jobkit.launch.states import States
from support.fake_study import make_plan
from support.limited_slurm import RUNS, SBATCH, SQUEUE, Clock, free


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake sbatch, and of what it is given."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    silent = "#!/bin/sh\nexit 1\n"
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "sacct": silent}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(folder / "none"))
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
    return folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rest_module, "time", made)
    return made


@pytest.fixture
def started(slurm: Path, clock: Clock) -> tuple[Rest, States]:
    """A study of which Slurm took three runs of five."""
    plan = make_plan("s", strategies=("ddp",), gpus=(1,), repeats=RUNS)
    free(slurm, 3)
    states = States(plan, ask=False)
    states.look()
    rest = Rest(plan, Site(name="here"), LaunchRequest())
    note = rest.submit(list(plan.runs), states)
    assert note.startswith("2 runs were not submitted: sbatch rejected the job: ")
    return rest, states
