"""jobkit measures how a training job scales on a cluster, and why not better."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`from jobkit import meter`, which others need not import."""
    if name == "meter":
        from jobkit.program import meter

        return meter
    raise AttributeError(f"module 'jobkit' has no attribute {name!r}")
