"""What all tests share: an environment that says nothing of jobs, sites or places; packages."""

import os
import signal
from typing import Any

import pytest

from support import needs

# On cores that several runs share, a thread that spins while it waits takes time from the others.
# libgomp reads it as it is loaded, with torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_OF_A_JOB = ("SLURM_", "SBATCH_", "JOBKIT_", "TORCHELASTIC_")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> None:
    """Whoever runs the tests inside a job, or with jobkit set up, gets the same answers."""
    for name in list(os.environ):
        of_a_job = name.startswith(_OF_A_JOB) and not name.startswith("JOBKIT_TEST_")
        if of_a_job or name in (*_OF_A_RANK, "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):
            del os.environ[name]  # without bytecode each rank would compile jobkit anew


@pytest.fixture(autouse=True, scope="session")
def _signals_can_be_sent() -> None:
    """A shell starts its background commands with INT ignored, nohup with HUP; what they start
    inherits that: tests that send them would wait for ever.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which may need the packages too
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Install what `@pytest.mark.needs("package", ...)` names, where it is absent."""
    for mark in item.iter_markers("needs"):
        needs.packages(*mark.args)


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of Slurm to every other worker: while they wait, the others' compute.

    None, which leaves the choice to pytest-xdist, unless a worker takes whole files.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TwoKinds(LoadFileScheduling):  # type: ignore[misc]
        def _assign_work_unit(self, node: Any) -> None:
            """The next file of the kind that is the worker's own, as long as there is one."""
            waits = self.nodes.index(node) % 2 == 0
            for file in self.workqueue:
                if file.startswith("tests/cluster/") == waits:
                    self.workqueue.move_to_end(file, last=False)
                    break
            super()._assign_work_unit(node)

    return TwoKinds(config, log)
