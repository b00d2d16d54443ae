"""One process under the start-up hook, of which ranks are forked."""

import importlib.util
from collections.abc import Iterator

import pytest

from support.warm_programs import Warm


@pytest.fixture(scope="package")
def warm() -> Iterator[Warm]:
    made = Warm(*["accelerate"] * (importlib.util.find_spec("accelerate") is not None))
    yield made
    made.close()
