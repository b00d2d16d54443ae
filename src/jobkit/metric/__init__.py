"""The [METRIC] line: its records, how they are written and how they are read."""
