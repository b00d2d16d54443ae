#!/usr/bin/env python3
"""Collect a study into tables: `python collect_results.py [logs/STUDY]`; `--help` says more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from jobkit import entry

if __name__ == "__main__":
    sys.exit(entry.run("jobkit.analysis.cli", "collect_main"))
