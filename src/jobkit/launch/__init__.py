"""Starts the runs of a plan, on this machine or on a cluster, and follows them.

    from jobkit.launch.launcher import launch
    from jobkit.spec.study import Study

    started = launch(Study.load("demo", epochs=1).expand())
    started.wait()

A run's settings and outcome are always read from the run's own files, so that any program sees
the same at any time.
"""
