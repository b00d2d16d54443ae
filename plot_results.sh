#!/usr/bin/env bash
# Collect a study, draw its figures, write its report, and open that where there is a display.
#
#   ./plot_results.sh               the newest study
#   ./plot_results.sh logs/demo     or just: demo
#   ./plot_results.sh demo --forecast 16 32     what follows the study goes to plot_results.py
#
# Ends with 0; with 3 where a run is not ok (the figures are drawn all the same); with 2 on wrong usage.
set -u
{ : 9<&0; } 2>/dev/null || exec </dev/null
{ : 9>&1; } 2>/dev/null || exec >/dev/null
true 9>&2 || exec 2>/dev/null # its own error is said nowhere: this stream is closed
trap : PIPE # a reader that has left (... | head) ends nothing

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${JOBKIT_PYTHON:-python}
command -v "$python" >/dev/null || {
  echo "jobkit: error: no '$python' on PATH: run 'make venv' once, then 'source .venv/bin/activate'" >&2
  exit 2
}

case ${1-} in
  -h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0 ;;
esac
study=()
[[ $# -eq 0 || $1 == -* ]] || { study=("$1"); shift; }
if (($#)) && [[ $1 != -* ]]; then
  echo "jobkit: error: one study at most: ./plot_results.sh [logs/STUDY] [options]" >&2
  exit 2
fi

# These two are of the tables, which the figures are drawn from.
tables=() figures=()
while (($#)); do
  case $1 in
    --apart | --accuracy=*) tables+=("$1") ;;
    --accuracy) tables+=("$1" ${2+"$2"}); shift ;;
    *) figures+=("$1") ;;
  esac
  shift
done
"$python" "$root/collect_results.py" --then-plot ${study[@]+"${study[@]}"} ${tables[@]+"${tables[@]}"}
collected=$?
((collected == 0 || collected == 3)) || exit "$collected"

# What was drawn is read from what the plotter says, so that the two never name different files.
drawn=$("$python" "$root/plot_results.py" ${study[@]+"${study[@]}"} ${figures[@]+"${figures[@]}"})
plotted=$?
printf '%s\n' "$drawn" 2>/dev/null
((plotted == 0)) || exit "$plotted"

open=''
if [[ $(uname) == Darwin ]]; then
  open=open
elif [[ -n ${DISPLAY-}${WAYLAND_DISPLAY-} ]]; then
  open=xdg-open
fi
report=$(sed -n 's/^next: open \(.*\.html\) in a browser$/\1/p' <<<"$drawn")
if [[ -n $open && -n $report ]] && command -v "$open" >/dev/null; then
  "$open" "$report" >/dev/null 2>&1 &
fi
exit "$collected"
