"""Starts the runs of a plan, on this machine or on a cluster, and follows them.

    from jobkit.launch import launch
    from jobkit.spec.plan import Study

    started = launch(Study.load("demo", epochs=1).expand())
    started.wait()

What a run is told and what became of it is always read from the run's own files, so that any
program, at any time, sees the same.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobkit.launch.launcher import Launch, launch
    from jobkit.launch.request import How

__all__ = ["How", "Launch", "launch"]


def __getattr__(name: str) -> Any:
    """Import on first use: the commands' --help needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(
        "jobkit.launch.request" if name == "How" else f"{__name__}.launcher"
    )
    return getattr(module, name)
