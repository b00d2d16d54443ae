"""Checks, before anything starts, which counters of energy the runs are told to read."""

from collections.abc import Mapping

from jobkit.errors import UsageError
from jobkit.program.machine import counters_to_read


def check_counters(environment: Mapping[str, str]) -> None:
    """Raise UsageError for a JOBKIT_ENERGY that names a counter which does not exist."""
    try:
        counters_to_read(environment)
    except ValueError as error:
        raise UsageError(str(error)) from None
