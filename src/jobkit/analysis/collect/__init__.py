"""Logs to tables: `collect(folder)` returns them as data frames."""

from jobkit.analysis.collect.results import collect

__all__ = ["collect"]
