"""What all tests share: a plain environment, packages, workers, and what a run says at its end."""

import os
import signal
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support import needs

pytest_plugins = ["support.budget"]

# On cores that several runs share, a thread that spins while it waits takes time from the others.
# libgomp reads it as it is loaded, with torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No example fails because the machine is slow.
_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.load_profile("patient")

_OF_A_JOB = ("SLURM_", "SBATCH_", "JOBKIT_", "TORCHELASTIC_")
# Of a rank; and without bytecode each rank would compile jobkit anew.
_OTHERS = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS "
_OTHERS += "PYTHONDONTWRITEBYTECODE"


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> None:
    """Whoever runs the tests inside a job, with jobkit set up or behind nohup gets the same."""
    for name in list(os.environ):
        of_a_job = name.startswith(_OF_A_JOB) and not name.startswith("JOBKIT_TEST_")
        if of_a_job or name in _OTHERS.split():
            del os.environ[name]
    # What a shell starts in the background ignores INT, with nohup HUP, and hands that on: tests
    # that send them would never end.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` one worker has all tests of Slurm, so that there is one Slurm.

    They come first: the other worker computes while they wait. Marks of groups would do, but
    pytest-xdist 3.8 puts them into names that pytest 9.2 no longer reads.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneSlurm(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            of_slurm = nodeid.startswith("tests/cluster/")
            return "cluster" if of_slurm else str(super()._split_scope(nodeid))

    return OneSlurm(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test with `@pytest.mark.needs("package", ...)` begins where these are installed."""
    for mark in item.iter_markers("needs"):
        needs.require(*mark.args)


@pytest.fixture(autouse=True)
def own_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test has a folder of logs of its own, below its temporary folder."""
    monkeypatch.setenv("JOBKIT_LOGS", str(tmp_path / "logs"))
