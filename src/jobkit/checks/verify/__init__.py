"""Compares every strategy with a single process."""
