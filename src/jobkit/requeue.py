"""When a job is warned of its end, and how often it goes on after that. run.sh has the same."""

MAX_RESTARTS = 3  # of a job that was stopped early with a checkpoint
WARNING_S = 60  # from the stop signal to the time limit
