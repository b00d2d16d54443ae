"""Tables, a summary, figures and a report from the logs of a study.

    from jobkit.analysis.collect import collect
    results = collect("demo")            # or a path; writes results.csv and epochs.csv
    results.runs, results.epochs         # pandas data frames

Nothing is imported here, so that a --help stays fast.
"""
