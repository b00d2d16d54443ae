"""A real Slurm of several simulated nodes on one machine: `hpc/minicluster --help`.

Standard library only, and what of jobkit is that too, so that it runs before anything is installed.
"""
