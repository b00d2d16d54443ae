"""Checks of a container environment file (EDF)."""
