"""What was trained, for programs without jobkit: `python -m jobkit export`."""
