"""What a run of several pods says to Kubernetes at its end."""

import os
import sys

from jobkit.errors import Exit


def code_of_pod(code: int) -> int:
    """Return the exit code of a run, or 1 where it is one early stop too many, and say so.

    run.sh has counted those before: Kubernetes does not count a pod that ends with 75.
    """
    if code != Exit.AGAIN or os.environ.get("JOBKIT_POD") != "counts":
        return code
    print(
        "jobkit: warning: this run was stopped early too often before: it ends with 1, which "
        "Kubernetes counts",
        file=sys.stderr,
    )
    return Exit.FAILED
