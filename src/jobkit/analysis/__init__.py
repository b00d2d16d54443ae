"""What the logs of a study say: tables, a summary, figures.

    from jobkit.analysis.collect import collect
    results = collect("demo")            # or a path; writes results.csv and epochs.csv
    results.runs, results.epochs         # pandas data frames

Nothing is imported here, so that a --help stays fast.
"""
