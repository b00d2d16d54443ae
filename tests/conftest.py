"""What all tests share: an environment that says nothing of jobs, sites or places."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> None:
    """Whoever runs the tests inside a job, or with jobkit set up, gets the same answers."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "JOBKIT_", "TORCHELASTIC_")) or name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "OMP_NUM_THREADS",
        ):
            if name not in ("JOBKIT_TEST_IMAGES",):
                del os.environ[name]
