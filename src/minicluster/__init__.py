"""A real Slurm of several simulated nodes on one machine: `hpc/minicluster --help`.

Standard library only, and nothing else of jobkit, so that it runs before anything is installed.
"""
