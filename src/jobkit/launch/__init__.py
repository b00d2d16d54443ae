"""Starts the runs of a plan, on this machine or on a cluster, and follows them.

    from jobkit.launch import launch
    from jobkit.plan import Study

    started = launch(Study.load("demo", epochs=1).expand())
    started.wait()

What a run is told and what became of it is always read from the run's own files, so that any
program, at any time, sees the same.
"""

from jobkit.launch.launcher import Launch, launch

__all__ = ["Launch", "launch"]
