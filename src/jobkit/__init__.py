"""jobkit measures how a training job scales on a cluster, and why not better."""

import sys
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`from jobkit import meter, launch, LaunchConfig`, which others need not import."""
    if name in ("launch", "LaunchConfig"):
        import importlib

        one = importlib.import_module("jobkit.launch.one")
        # The package can be called: its name is the function's.
        return one.LaunchConfig if name == "LaunchConfig" else sys.modules["jobkit.launch"]
    if name == "meter":
        from jobkit.program import meter

        return meter
    raise AttributeError(f"module 'jobkit' has no attribute {name!r}")
