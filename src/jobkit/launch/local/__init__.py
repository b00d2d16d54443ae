"""Runs of a study on this machine."""
