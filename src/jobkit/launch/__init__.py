"""Starts the runs of a plan, on this machine or on a cluster, and follows them.

    from jobkit.launch.launcher import launch
    from jobkit.spec.plan import Study

    started = launch(Study.load("demo", epochs=1).expand())
    started.wait()

A run's settings and outcome are always read from the run's own files, so that any program sees
the same at any time.
"""

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """This package, which `from jobkit import launch` gives: called, it starts one run."""

    def __call__(self, config: Any) -> int:
        """Run a LaunchConfig to its end; return its exit code."""
        from jobkit.launch.one import launch

        return launch(config)


sys.modules[__name__].__class__ = _Package
