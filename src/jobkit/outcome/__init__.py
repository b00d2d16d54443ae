"""The final state of a run, from its own files and from Slurm."""
