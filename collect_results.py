#!/usr/bin/env python
"""Collect a study into results.csv and epochs.csv: python collect_results.py [logs/STUDY]"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"))  # noqa: PTH

from jobkit import door  # noqa: E402

sys.exit(door.run("jobkit.analysis.cli", "collect_main"))
