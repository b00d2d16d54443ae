"""Runs of a study as Slurm jobs."""
