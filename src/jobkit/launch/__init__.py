"""Starts the runs of a plan, on this machine or on a cluster, and follows them: launcher.launch().

A run's settings and outcome are always read from the run's own files, so that any program sees
the same at any time.
"""
