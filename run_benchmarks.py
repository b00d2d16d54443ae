#!/usr/bin/env python3
"""Run a study: `python run_benchmarks.py --study demo`; `--help` says more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from jobkit import entry

if __name__ == "__main__":
    sys.exit(entry.run("jobkit.launch.cli", "main"))
