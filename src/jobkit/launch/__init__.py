"""Starts the runs of a plan, on this machine or on a cluster: launcher.launch(), and run.sh."""
