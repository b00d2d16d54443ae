"""`python -m jobkit.minicluster` is the same as `hpc/minicluster`."""

import sys

from jobkit.minicluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
