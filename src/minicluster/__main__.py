"""`python -m minicluster` is the same as `hpc/minicluster`."""

import sys

from minicluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
