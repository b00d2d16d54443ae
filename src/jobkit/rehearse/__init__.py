"""Rehearsal of a job at full size with stand-ins for its ranks: `python -m jobkit rehearse`."""
