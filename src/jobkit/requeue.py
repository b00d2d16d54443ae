"""When a job is signalled before its end, and how often requeued; the same as in run.sh."""

MAX_RESTARTS = 3  # of a job that was stopped early with a checkpoint
WARNING_S = 60  # from the stop signal to the time limit
