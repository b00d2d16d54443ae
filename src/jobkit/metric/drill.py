"""The columns of drill.csv, which `python -m jobkit drill` writes: name and meaning."""

COLUMNS = {
    "fault": "the injected fault",
    "where": "nodes of the first attempt, or 'here'; empty if the fault is not possible there",
    "first_status": "status of the attempt into which the fault was injected",
    "evidence": "the line of a log or file that shows it",
    "final_status": "status of the run after all attempts",
    "attempts": "number of attempts of the run",
    "detected_s": "from the injection to the end of the first attempt, as the launcher saw it",
    "restart_s": "from the start of the next attempt to its first iteration",
    "iterations_lost": "iterations redone after the restart",
    "same_parameters": "whether the final parameters are bitwise equal to those without a fault",
    "orphans": "leaked processes; empty if they cannot be observed",
    "note": "other deviations from the expected result",
}
