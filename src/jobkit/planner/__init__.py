"""Before a job: the memory of each strategy, and which strategy to take."""
