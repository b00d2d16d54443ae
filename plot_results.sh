#!/usr/bin/env bash
# Collect a study, draw its figures, and open them where there is a display.
#
#   ./plot_results.sh               the newest study
#   ./plot_results.sh logs/demo     or just: demo
#
# Ends with 0; with 3 where a run is not ok (the figures are drawn all the same); with 2 on wrong usage.
set -u

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
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
(($# <= 1)) || { echo "jobkit: error: one study at most: ./plot_results.sh [logs/STUDY]" >&2; exit 2; }

"$python" "$root/collect_results.py" "$@"
collected=$?
((collected == 0 || collected == 3)) || exit "$collected"

# What was drawn is read from what the plotter says, so that the two never name different files.
drawn=$("$python" "$root/plot_results.py" "$@")
plotted=$?
printf '%s\n' "$drawn"
((plotted == 0)) || exit "$plotted"

open=''
if [[ $(uname) == Darwin ]]; then
  open=open
elif [[ -n ${DISPLAY-}${WAYLAND_DISPLAY-} ]]; then
  open=xdg-open
fi
if [[ -n $open ]] && command -v "$open" >/dev/null; then
  while read -r _ file; do
    [[ $file == *.png ]] && "$open" "$file" >/dev/null 2>&1 &
  done <<<"$drawn"
fi
exit "$collected"
