"""Rehearsal of a job at full size with simulated ranks: `python -m jobkit rehearse`."""
