#!/usr/bin/env bash
# Collect a study, draw its figures, write its report, and open that where there is a display.
#
#   ./plot_results.sh               the newest study
#   ./plot_results.sh logs/demo     or just: demo
#   ./plot_results.sh demo --forecast 16 32     with the options of plot_results.py
#
# Ends with 0; with 3 where a run is not ok (the figures are drawn all the same); with 2 on wrong usage.
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${JOBKIT_PYTHON:-python}
command -v "$python" >/dev/null || {
  echo "jobkit: error: no '$python' on PATH: run 'make venv' once, then 'source .venv/bin/activate'" >&2
  exit 2
}
exec "$python" "$root/plot_results.py" --collect --open "$@"
