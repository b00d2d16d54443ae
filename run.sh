#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --output=logs/train-%j.log
#SBATCH --error=logs/train-%j.err
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@60
# Cores: a rank on a GPU wants 4 to 16. Where nodes have fewer: sbatch --cpus-per-task=4 run.sh ...
#
# Runs one training job: jobkit's own training, or any program. This file is what sbatch reads; all
# else is done by src/jobkit/launch/supervise.py, which it becomes.
#
#   sbatch run.sh --strategy ddp --epochs 2                    on a cluster: 1 node, 4 GPUs
#   sbatch --nodes=2 run.sh --strategy fsdp                    2 nodes
#   bash run.sh --nproc-per-node 2 --strategy ddp --epochs 2   on this machine, without Slurm
#   sbatch run.sh -- python train.py --batch-size 32           any program: its command after --
#   bash run.sh --nproc-per-node 2 -- python train.py          the same on this machine
#
# Options of run.sh, in any order:
#   --nproc-per-node N   ranks on this machine (default: one per GPU, else 1); not in an allocation
#   --site NAME          use the set-up lines, environment and container of hpc/sites/NAME.toml
#   --preflight          in an allocation: check it first, train only if every check passes
#   --comm               measure the communication between the ranks instead of training
#   --nodes N, --ntasks-per-node N   in an allocation: use only this part of it
#   --run-dir DIR        the run's folder (default: a new one in logs/single/)
#   --max-restarts N     maximum number of new starts: in a job, of requeues after an early stop
#                        with a checkpoint (default 3) and of restarts within the job after a
#                        failure (default 0); elsewhere after either (default 0)
#   --monitor-interval S   not in an allocation: seconds between torchrun's checks of the ranks (0.1)
#   --start-timeout S    not in an allocation: seconds until all machines must have come (60)
#   --shutdown-timeout S   not in an allocation: seconds from TERM until a rank is killed (15;
#                        under torchrun 30)
#   --nnodes N, --node-rank K, --master-addr HOST, --master-port P   several machines without
#                        Slurm: run.sh is started on each, with K from 0; HOST is machine 0, and P
#                        a free port there (29500). --run-dir names a folder that all of them see
#   --dry-run, --check   say or check what would run, and write nothing
#   --help               this list; --help-training: options of the training (with --comm: of the
#                        benchmark)
#   --launcher NAME      of a command: srun (default; one process per rank), torchrun (one agent
#                        per node), once (one process on the first node, which starts its ranks)
#   --unit TEXT, --work-per-step X, --warmup-steps N   of a command: what one optimizer step over
#                        all ranks works on, as tokens and 49152; first steps that do not count (5)
#   --no-auto            of a command: do not count the steps of torch's optimizers
#   --why N              steps that are profiled at each of a few places (5; 0: none)
# Everything else is passed through to the training. After -- comes a command.
#
# USR2 a minute before the time limit (Slurm may send it up to a minute earlier), or TERM to the
# ranks: they save a checkpoint and end; then the job is requeued and resumes from it. With a limit
# of a few minutes say --signal=CONT@1, else the warning comes as the job starts.
#
# Exit codes: 0 ok; 1 the run failed; 2 wrong usage; 4 ranks differ (--check-ranks); 5 a check of
# --preflight failed; 75 stopped early with a checkpoint: run it again with the same --run-dir; 130
# on INT, 143 on TERM and HUP (in a pod, where JOBKIT_POD=1 says so, 0 or 75 where the run ended
# so). Of a command: that of its first rank that failed; 127 where a node does not have it. The
# outcome that the training leaves decides where it and the launcher's code differ: a crash after
# "ok" was recorded is a warning, because every result is there by then.
set -u
# Streams that were closed would be the first files that somebody opens.
{ : 9<&0; } 2>/dev/null || exec </dev/null
{ : 9>&1; } 2>/dev/null || exec >/dev/null
{ : 9>&2; } 2>/dev/null || exec 2>/dev/null
umask go-w # others may read what a run leaves, and change nothing

fail() { printf 'jobkit: error: %s\n' "$1" >&2; exit "${2:-2}"; }

# sbatch runs a copy of this file: then its own path says nothing, the submit directory does, or
# the Python that jobkit is installed for.
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -d $root/src/jobkit ]]; then root=${JOBKIT_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}; fi
if [[ ! -d $root/src/jobkit && -z ${JOBKIT_ROOT-} ]]; then
  installed=$("${JOBKIT_PYTHON:-python}" -m jobkit --prefix 2>/dev/null) && root=$installed
fi
[[ -d $root/src/jobkit ]] ||
  fail "no src/jobkit in $root: submit from jobkit's folder, or install jobkit for the python on PATH"
# Nothing is imported from the current folder, which may be another user's, but --model.
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1

site='' site_file='' words=("$@")
for ((at = 0; at < $#; at++)); do
  case ${words[at]} in
    --) break ;;
    --help | -h)
      echo "usage: bash run.sh [options]   or   sbatch [options of sbatch] run.sh [options]"
      echo
      sed -n '/^# Options of run.sh/,/^# Everything else/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0 ;;
    --site) site=${words[at + 1]-} ;;
    --site=*) site=${words[at]#*=} ;;
    --site-file) site_file=${words[at + 1]-} ;;
    --site-file=*) site_file=${words[at]#*=} ;;
  esac
done

# The Python of this host, which need not be that of the ranks, as in a container.
find_python() {
  local candidate candidates=("${JOBKIT_HOST_PYTHON-}")
  [[ -n ${JOBKIT_HOST_PYTHON-} ]] ||
    candidates=("${JOBKIT_PYTHON:-python}" "$root/.venv/bin/python" python3 python3.{14,13,12,11,10})
  for candidate in "${candidates[@]}"; do
    "$candidate" -ISc 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
    host_python=$candidate
    return
  done
  fail "no Python 3.10 or newer on $(uname -n) (tried ${candidates[*]}): name one with JOBKIT_HOST_PYTHON"
}

# What the site wants before the launch: environment, set-up lines, container. The same lines for
# a single job (--site NAME) and in a study, whose launcher has left them in a file.
srun_options=() inside=()
[[ -z $site_file || -r $site_file ]] || fail "$site_file cannot be read"
if [[ -n $site ]]; then
  find_python
  lines=$("$host_python" -m jobkit.launch.site "$site") || exit
  set +u # modules and conda use variables that may be unset
  eval "$lines" || fail "site $site: syntax error in its set-up lines" 1
elif [[ -n $site_file ]]; then
  set +u
  # shellcheck source=/dev/null
  source "$site_file" || fail "$site_file: syntax error" 1
fi
set -u
if [[ -n ${JOBKIT_PYTHON-} ]]; then export JOBKIT_PYTHON; fi # a site may have set it
find_python
# Python 3.10 would look for modules in the current folder first.
exec "$host_python" -c 'import sys
sys.path[:] = filter(None, sys.path)
from jobkit import entry
from jobkit.launch.supervise import main
sys.exit(entry.call(main))' "$root/run.sh" "${#srun_options[@]}" ${srun_options[@]+"${srun_options[@]}"} \
  "${#inside[@]}" ${inside[@]+"${inside[@]}"} "$@"
