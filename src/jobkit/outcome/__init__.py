"""What became of a run, from its own files and from Slurm."""
