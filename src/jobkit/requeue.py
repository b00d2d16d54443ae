"""When a job is signalled before its end, and how often requeued; the same as in run.sh."""

MAX_RESTARTS = 3  # of a job that was stopped early with a checkpoint
WARNING_S = 60  # from the stop signal to the time limit

# Codes that another start would not mend: ok, bad input, a command that cannot be started or was
# not found, stopped early, and the end on request (HUP, INT, USR1, USR2, TERM).
_NO_CRASH = (0, 2, 75, 126, 127, 129, 130, 138, 140, 143)


def crashed(exit_code: int) -> bool:
    """Whether a run failed in a way that another start may mend; the same as in run.sh."""
    return exit_code not in _NO_CRASH
