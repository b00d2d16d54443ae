#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output=logs/train-%j.log
#SBATCH --error=logs/train-%j.err
#SBATCH --open-mode=append
#
# One training job. The only place where srun (in an allocation) or torchrun (elsewhere) is spelled.
#
#   sbatch run.sh --strategy ddp --epochs 2                    on a cluster: 1 node, 4 GPUs
#   sbatch --nodes=2 run.sh --strategy fsdp                    2 nodes
#   bash run.sh --nproc-per-node 2 --strategy ddp --epochs 2   on this machine, without Slurm
#
# Options of its own, which may stand anywhere:
#   --nproc-per-node N   ranks on this machine (default: its GPUs, else 1); not in an allocation
#   --site NAME          set-up lines, environment and container of hpc/sites/NAME.toml
#   --preflight          in an allocation: check it first, train only when it is sound
#   --nodes N, --ntasks-per-node N   in an allocation: use only so much of it
#   --run-dir DIR        the run's folder (default: a new one in logs/single/)
# Everything else goes to the payload as it is: see `bash run.sh --help`.
#
# Exit codes: 0 ok; 1 the run failed; 2 wrong usage; 75 stopped early, run me again; 130 and 143 on
# INT and TERM. The outcome that the payload leaves decides where it and the launcher's code differ:
# a crash after "ok" was recorded is a warning, because every result is there by then.
set -u

fail() { echo "jobkit: error: $1" >&2; exit "${2:-2}"; }
warn() { echo "jobkit: warning: $1" >&2; }

# sbatch runs a copy of this file: then its own path says nothing, the submit directory does.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -d $root/src/jobkit ]]; then root=${JOBKIT_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}; fi
[[ -d $root/src/jobkit ]] || fail "no src/jobkit in $root: submit from jobkit's folder"
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

nproc_per_node='' run_dir='' site='' site_file='' nodes='' ntasks_per_node='' preflight=''
own_dir='' only='' payload=()
while (($#)); do
  case $1 in
    --nproc-per-node | --run-dir | --site | --site-file | --nodes | --ntasks-per-node)
      (($# > 1)) || fail "$1 needs a value"
      own=${1#--}
      printf -v "${own//-/_}" %s "$2"
      shift ;;
    --nproc-per-node=* | --run-dir=* | --site=* | --site-file=* | --nodes=* | --ntasks-per-node=*)
      own=${1%%=*} own=${own#--}
      printf -v "${own//-/_}" %s "${1#*=}" ;;
    --preflight) preflight=1 ;;
    *)
      case $1 in
        --help | -h) only=help ;;
        --check | --check=*) only=${only:-check} ;;
        --dry-run) only=${only:-dry-run} ;;
      esac
      payload+=("$1") ;;
  esac
  shift
done

in_allocation=${SLURM_JOB_ID:+1}
# What the site wants before the launch: environment, set-up lines, container. The same lines for
# a single job (--site NAME) and in a study, whose launcher has left them in a file.
srun_options=() inside=()
if [[ -n $site ]]; then
  lines=$("${JOBKIT_PYTHON:-python}" -m jobkit.launch.site "$site") || exit
  set +u # modules and conda use variables that may be unset
  eval "$lines"
  set -u
elif [[ -n $site_file ]]; then
  [[ -r $site_file ]] || fail "$site_file cannot be read"
  set +u
  # shellcheck source=/dev/null
  source "$site_file"
  set -u
fi
for own in nodes ntasks_per_node; do
  [[ -z ${!own} || ${!own} =~ ^[1-9][0-9]{0,5}$ ]] || fail "--${own//_/-} ${!own}: must be a whole number, 1 or more"
done
[[ -z $nodes || -n $ntasks_per_node ]] || fail "--nodes needs --ntasks-per-node beside it"
python=${JOBKIT_PYTHON:-python}
if [[ -z $in_allocation ]]; then
  [[ -z $nodes$ntasks_per_node ]] ||
    fail "--nodes and --ntasks-per-node are for an allocation; here say --nproc-per-node"
  command -v "$python" >/dev/null ||
    fail "no '$python' on PATH: run 'make venv' once, then 'source .venv/bin/activate'"
  "$python" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("torchvision")))' ||
    fail "$(command -v "$python") has no torch and torchvision: run 'make venv' once, then 'source .venv/bin/activate'"
  [[ $only == help ]] && exec "$python" -m jobkit.payload.main --help
  if [[ -z $nproc_per_node ]]; then
    nproc_per_node=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
    ((nproc_per_node)) || nproc_per_node=1
  fi
  [[ $nproc_per_node =~ ^[1-9][0-9]{0,3}$ ]] || fail "--nproc-per-node $nproc_per_node: must be a whole number, 1 or more"
  # Bad settings end here, in a tenth of a second and with nothing written.
  "$python" -m jobkit.payload.main ${payload[@]+"${payload[@]}"} --check="$nproc_per_node" || exit
  [[ $only == check ]] && exit 0
elif [[ ${#inside[@]}${#srun_options[@]} == 00 ]]; then
  # Said once here rather than by every rank; in a container only the ranks have a Python.
  ranks=${SLURM_NTASKS:-1}
  [[ -z $ntasks_per_node ]] || ranks=$((${nodes:-1} * ntasks_per_node))
  "$python" -m jobkit.payload.main ${payload[@]+"${payload[@]}"} --check="$ranks" || exit
  [[ $only == check ]] && exit 0
fi
if [[ -n $in_allocation && -n $nproc_per_node ]]; then
  warn "--nproc-per-node has no effect in an allocation: srun starts the tasks that were asked for"
fi

# A number for this attempt: making its folder claims it, so that no two starts share one.
outcome=''
if [[ -z $only ]]; then
  if [[ -z $run_dir ]]; then
    name=${SLURM_JOB_ID:+job-$SLURM_JOB_ID}
    own_dir=${JOBKIT_LOGS:-$root/logs}/single/${name:-run-$(date +%Y%m%d-%H%M%S)-$$}
    run_dir=$own_dir
  fi
  mkdir -p -- "$run_dir/attempts" 2>/dev/null && [[ -w $run_dir/attempts ]] ||
    fail "$run_dir is not writable: choose another with --run-dir"
  attempt=0
  until mkdir -- "$run_dir/attempts/$attempt" 2>/dev/null; do
    [[ -d $run_dir/attempts/$attempt ]] || fail "$run_dir/attempts: cannot be written" 1
    ((attempt++ < 10000)) || fail "$run_dir/attempts: no new attempt can be made there" 1
  done
  outcome=$run_dir/attempts/$attempt/outcome.json
  payload+=(--run-dir "$run_dir" --attempt "$attempt")
  echo "[jobkit] start: attempt $attempt of $run_dir on $(uname -n) at $(date +%Y-%m-%dT%H:%M:%S%z)"
fi

# Starts a module of jobkit as one task a rank.
on_every_rank() {
  # Options that a job inherits and that would contradict those given here.
  unset SLURM_TRES_PER_TASK
  local size=()
  if [[ -n $ntasks_per_node ]]; then # a part of the allocation
    size=(--nodes="${nodes:-1}" --ntasks="$((${nodes:-1} * ntasks_per_node))"
      --ntasks-per-node="$ntasks_per_node")
  fi
  # Without --kill-on-bad-exit the ranks that are left would wait for ever. Never --unbuffered:
  # srun then tears lines. cpus-per-task said again: srun does not inherit it.
  srun --kill-on-bad-exit=1 --wait=60 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    ${size[@]+"${size[@]}"} ${srun_options[@]+"${srun_options[@]}"} \
    ${inside[@]+"${inside[@]}"} "$python" -m "$@"
}

if [[ -n $in_allocation ]]; then
  # People type `tail -f train.log`: the newest job's log, in the folder that it was submitted from.
  if [[ -n ${SLURM_SUBMIT_DIR-} && -f $SLURM_SUBMIT_DIR/logs/train-$SLURM_JOB_ID.log ]]; then
    for kind in log err; do
      # Never over a file of the user's own.
      [[ -L $SLURM_SUBMIT_DIR/train.$kind || ! -e $SLURM_SUBMIT_DIR/train.$kind ]] || continue
      ln -sfn "logs/train-$SLURM_JOB_ID.$kind" "$SLURM_SUBMIT_DIR/train.$kind" 2>/dev/null
    done
  fi
  [[ -n ${OMP_NUM_THREADS-} || -z ${SLURM_CPUS_PER_TASK-} ]] || export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
  if [[ -n $preflight ]]; then
    on_every_rank jobkit.payload.preflight ${run_dir:+--run-dir "$run_dir"} -- \
      ${payload[@]+"${payload[@]}"} || fail "preflight failed: nothing was trained" 5
  fi
  on_every_rank jobkit.payload.main ${payload[@]+"${payload[@]}"}
  code=$?
else
  if [[ -z ${OMP_NUM_THREADS-} ]]; then # torchrun would set 1, and warn
    threads=$(($(nproc) / nproc_per_node))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
  fi
  # Without a folder there is no outcome to read, and the ranks' own codes count.
  [[ -n $outcome ]] && export JOBKIT_READS_OUTCOME=1
  # In the background, so that a signal reaches this shell at once and can be handed on: as TERM,
  # because a shell has its background commands ignore INT until they say otherwise.
  stopped='' child=''
  trap 'stopped=143; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null' TERM
  trap 'stopped=130; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null' INT
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc_per_node" \
    -m jobkit.payload.main ${payload[@]+"${payload[@]}"} &
  child=$!
  [[ -z $stopped ]] || kill -TERM "$child" 2>/dev/null
  while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  [[ -z $stopped ]] || exit "$stopped"
fi

# The outcome that the payload left says more than a launcher's code can.
if [[ -f $outcome ]]; then
  said=$(sed -n 's/^{"exit_code": \([0-9]\{1,3\}\),.*/\1/p' "$outcome")
  if ((code && ${said:-1} == 0)); then
    warn "the launcher ended with code $code after the run had recorded its success: the results stand, the log says what crashed"
  fi
  code=${said:-$code}
fi
# Bad input leaves nothing behind in a folder that nobody asked for.
if ((code == 2)) && [[ -n $own_dir && ! -e $own_dir/spec.json ]]; then rm -rf -- "$own_dir"; fi
exit "$code"
