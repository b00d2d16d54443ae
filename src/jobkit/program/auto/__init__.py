"""The folder that is put on PYTHONPATH: it holds the start-up hook and nothing else."""
