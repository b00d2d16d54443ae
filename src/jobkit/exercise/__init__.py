"""Exercises in distributed training: probes to run, skeletons to complete and their checks."""
