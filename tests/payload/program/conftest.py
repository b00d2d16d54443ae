"""Processes under the start-up hook, of which ranks are forked."""

import importlib.util
from collections.abc import Iterator

import pytest

from support.warm_programs import Warm


@pytest.fixture(scope="package")
def warm() -> Iterator[Warm]:
    made = Warm(*["accelerate"] * (importlib.util.find_spec("accelerate") is not None))
    yield made
    made.close()


@pytest.fixture(scope="package")
def libraries() -> Iterator[Warm]:
    """The libraries, imported once and not by each rank: that costs 20 CPU-seconds."""
    modules = ("lightning", "transformers.trainer", "accelerate")
    made = Warm(*(name for name in modules if importlib.util.find_spec(name.split(".")[0])))
    yield made
    made.close()
