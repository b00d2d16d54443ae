"""Errors that end a command with one clear line and an exit code."""

from __future__ import annotations


class ClusterError(Exception):
    """Something failed on this machine: exit 1."""

    code = 1


class UsageError(ClusterError):
    """What the user asked for cannot be done as asked: exit 2, nothing was started."""

    code = 2


class DaemonError(ClusterError):
    """A daemon did not come up: its logs are kept, so that they can be read."""


class Interrupted(BaseException):
    """A signal arrived while the cluster was being brought up."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum
