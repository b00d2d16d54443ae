#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --output=logs/train-%j.log
#SBATCH --error=logs/train-%j.err
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@60
#
# Runs one training job: jobkit's own training, or any program. Only this file, with
# hpc/command.bash, calls srun (in an allocation) or torchrun (elsewhere).
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
#   --monitor-interval S, --start-timeout S   not in an allocation: seconds between torchrun's
#                        checks of the ranks (0.1), and until all ranks must have started (60)
#   --shutdown-timeout S   not in an allocation: seconds from TERM until a rank is killed (15;
#                        under torchrun 30)
#   --nnodes N, --node-rank K, --master-addr HOST, --master-port P   several machines without
#                        Slurm: run.sh is started on each, with K from 0; HOST is machine 0,
#                        which listens at port P (29500)
#   --help               this list; --help-training: options of the training (with --comm: of the
#                        benchmark)
#   --launcher NAME      of a command: srun (default; one process per rank), torchrun (one agent
#                        per node), once (one process on the first node, which starts its ranks)
#   --unit TEXT, --work-per-step X, --warmup-steps N   of a command: what one optimizer step over
#                        all ranks works on, as tokens and 49152; first steps that do not count (5)
#   --why N              steps that are profiled at each of a few places (5; 0: none)
#   --no-auto            of a command: do not count the steps of torch's optimizers
#   --stop-signal NAME   USR2 (default) or USR1: the signal that asks a run to save and end
# Everything else is passed through to the training. After -- comes a command.
#
# USR2 a minute before the time limit (Slurm may send it up to a minute earlier), or TERM: the ranks
# save a checkpoint and end; then the job is requeued and resumes from it. With a limit of a few
# minutes say --signal=CONT@1, else the warning comes as the job starts.
#
# Exit codes: 0 ok; 1 the run failed; 2 wrong usage; 4 ranks differ (--check-ranks); 5 a check of
# --preflight failed; 75 stopped early with a checkpoint: run it again with the same --run-dir; 130
# on INT, 143 on TERM and HUP (in a pod, where JOBKIT_POD=1 says so, 0 or 75 where the run ended
# so). Of a command: that of its first rank that failed; 127 where a node does not have it. The
# outcome that the training leaves decides where it and the launcher's code differ: a crash after
# "ok" was recorded is a warning, because every result is there by then.
set -u
# Streams that were closed would be the first files that somebody opens. A reader that has left
# (... | head) ends no training.
{ : 9<&0; } 2>/dev/null || exec </dev/null
{ : 9>&1; } 2>/dev/null || exec >/dev/null
true 9>&2 || exec 2>/dev/null # its own error is said nowhere: this stream is closed
trap : PIPE
umask go-w # others may read what a run leaves, and change nothing

show_help() {
  echo "usage: bash run.sh [options]   or   sbatch [options of sbatch] run.sh [options]"
  echo
  sed -n '/^# Options of run.sh/,/^# Everything else/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

fail() { echo "jobkit: error: $1" >&2; exit "${2:-2}"; }
note() { echo "jobkit: note: $1" >&2; }
warn() { echo "jobkit: warning: $1" >&2; }

# sbatch runs a copy of this file: then its own path says nothing, the submit directory does, or
# the Python that jobkit is installed for.
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -d $root/src/jobkit ]]; then root=${JOBKIT_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}; fi
if [[ ! -d $root/src/jobkit && -z ${JOBKIT_ROOT-} ]]; then
  installed=$("${JOBKIT_PYTHON:-python}" -m jobkit --prefix 2>/dev/null) && root=$installed
fi
[[ -d $root/src/jobkit ]] ||
  fail "no src/jobkit in $root: submit from jobkit's folder, or install jobkit for the python on PATH"
logs=$PWD/logs own_python=$root/.venv/bin/python
if [[ $PWD/ == "$root"/* ]]; then logs=$root/logs; fi
advice="run 'make venv' once, then 'source .venv/bin/activate'"
if [[ $root == */jobkit/_kit ]]; then # installed by pip
  own_python=${root%/lib*/python*/site-packages/jobkit/_kit}/bin/python
  advice="run \"python -m pip install '/path/to/jobkit[payload]'\", of a checkout or a wheel"
fi
# Looked for and not imported, which would take seconds.
has_torch() {
  command -v "$1" >/dev/null &&
    "$1" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("torchvision")))'
}
# Nothing is imported from the current folder, which may be another user's, but --model.
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1

nproc_per_node='' run_dir='' site='' site_file='' nodes='' ntasks_per_node='' preflight=''
max_restarts='' monitor_interval=0.1 start_timeout=60 stop_signal=USR2
nnodes='' node_rank='' master_addr='' master_port='' shutdown_timeout='' given=("$@")
own_dir='' only='' payload=() module=jobkit.payload.main place=single
command=() launcher='' unit='' work_per_step='' warmup_steps='' no_auto=''
while (($#)); do
  case $1 in
    --nproc-per-node | --run-dir | --site | --site-file | --nodes | --ntasks-per-node | \
      --max-restarts | --monitor-interval | --start-timeout | --launcher | --unit | \
      --work-per-step | --warmup-steps | --nnodes | --node-rank | --master-addr | \
      --master-port | --shutdown-timeout)
      (($# > 1)) || fail "$1 needs a value"
      own=${1#--}
      printf -v "${own//-/_}" %s "$2"
      shift ;;
    --nproc-per-node=* | --run-dir=* | --site=* | --site-file=* | --nodes=* | --ntasks-per-node=* | \
      --max-restarts=* | --monitor-interval=* | --start-timeout=* | --launcher=* | --unit=* | \
      --work-per-step=* | --warmup-steps=* | --nnodes=* | --node-rank=* | --master-addr=* | \
      --master-port=* | --shutdown-timeout=*)
      own=${1%%=*} own=${own#--}
      printf -v "${own//-/_}" %s "${1#*=}" ;;
    --preflight) preflight=1 ;;
    --no-auto) no_auto=1 ;;
    --)
      shift
      (($#)) || fail "-- needs a command after it, as: -- python train.py"
      command=("$@")
      break ;;
    --help-training) only=help ;;
    --comm) module=jobkit.checks.comm place=comm ;;
    *)
      case $1 in
        --help | -h) show_help && exit 0 ;;
        --check | --check=*) only=${only:-check} ;;
        --dry-run) only=${only:-dry-run} ;;
        --stop-signal) stop_signal=${2-} ;; # the payload has it too, and checks it
        --stop-signal=*) stop_signal=${1#*=} ;;
      esac
      payload+=("$1") ;;
  esac
  shift
done

if ((${#command[@]})); then
  # shellcheck source-path=SCRIPTDIR source=hpc/command.bash
  source "$root/hpc/command.bash"
  check_command
elif [[ -n $launcher$unit$work_per_step$warmup_steps$no_auto ]]; then
  fail "--launcher, --unit, --work-per-step, --warmup-steps and --no-auto are of a command, which comes after --"
fi
[[ -z $preflight || $place == single ]] || fail "--comm and --preflight: one after the other, not both"
in_allocation=${SLURM_JOB_ID:+1}
# One of several machines: which attempt this is, and where, was agreed on by all of them.
given_attempt=''
if [[ -n $nnodes$node_rank$master_addr$master_port ]]; then
  # shellcheck source-path=SCRIPTDIR source=hpc/nodes.bash
  source "$root/hpc/nodes.bash"
  check_nodes
  if [[ -n ${JOBKIT_NODES-} ]]; then
    read -r _ _ given_attempt <<<"$JOBKIT_NODES"
    run_dir=$JOBKIT_NODES_RUN_DIR max_restarts=0
  fi
  unset JOBKIT_NODES JOBKIT_NODES_RUN_DIR
fi
# What the site wants before the launch: environment, set-up lines, container. The same lines for
# a single job (--site NAME) and in a study, whose launcher has left them in a file.
srun_options=() inside=()
if [[ -n $site ]]; then
  reader=${JOBKIT_PYTHON:-python}
  if [[ -z ${JOBKIT_PYTHON-} && -x $own_python ]]; then reader=$own_python; fi
  lines=$("$reader" -m jobkit.launch.site "$site") || exit
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
[[ -z $max_restarts || $max_restarts =~ ^[0-9]{1,4}$ ]] ||
  fail "--max-restarts $max_restarts: must be a whole number, 0 or more"
for own in monitor_interval start_timeout shutdown_timeout; do
  [[ -n ${!own} ]] || continue
  [[ ${!own} =~ ^[0-9]{1,6}(\.[0-9]{1,3})?$ && ${!own} =~ [1-9] ]] ||
    fail "--${own//_/-} ${!own}: must be a number of seconds, above 0"
done
if [[ ${JOBKIT_ENERGY:-none} != none ]]; then # counters' names; program/machine.py has them too
  [[ ,$JOBKIT_ENERGY =~ ^(,(nvml|pm_counters))+$ ]] ||
    fail "JOBKIT_ENERGY='${JOBKIT_ENERGY//[[:cntrl:]]/ }': name some of nvml, pm_counters, separated by commas, or none"
fi
[[ $stop_signal == USR[12] ]] || stop_signal=USR2 # what is wrong is told below
[[ -z $nodes || -n $ntasks_per_node ]] || fail "--nodes needs --ntasks-per-node beside it"
python=${JOBKIT_PYTHON:-python}
# In a shell that has not activated it, jobkit's own environment, unless another was named: a
# container's is, by the site, and in an allocation nothing is looked for where there is no .venv.
torch_there=''
if ((${#command[@]})); then
  torch_there=1 # the command has a Python of its own, or none
elif [[ -z $in_allocation || (-z ${JOBKIT_PYTHON-} && -x $own_python) ]]; then
  if has_torch "$python"; then
    torch_there=1
  elif [[ -z ${JOBKIT_PYTHON-} && -x $own_python ]] && has_torch "$own_python"; then
    note "no python on PATH that has torch: taking $own_python"
    python=$own_python torch_there=1
  fi
fi
if [[ $only == help ]]; then exec "$python" -m "$module" --help; fi
if [[ -z $in_allocation ]]; then
  [[ -z $nodes$ntasks_per_node ]] ||
    fail "--nodes and --ntasks-per-node are for an allocation; here say --nproc-per-node"
  command -v "$python" >/dev/null ||
    fail "no '$python' on PATH: $advice"
  [[ -n $torch_there ]] ||
    fail "$(command -v "$python") has no torch and torchvision: $advice"
  if [[ -z $nproc_per_node ]]; then
    for own in nvidia-smi amd-smi rocm-smi; do # without one of them Python need not look
      if command -v "$own" >/dev/null; then nproc_per_node=$("$python" -m jobkit.gpus) && break; fi
    done
    ((nproc_per_node)) || nproc_per_node=1
    # A collective needs at least 2 ranks.
    if [[ $place == comm ]] && ((nproc_per_node < 2)); then nproc_per_node=2; fi
  fi
  [[ $nproc_per_node =~ ^[1-9][0-9]{0,3}$ ]] || fail "--nproc-per-node $nproc_per_node: must be a whole number, 1 or more"
  # Bad settings end here, in a tenth of a second and with nothing written.
  if ((${#command[@]})); then
    [[ -n $run_dir ]] || type -P -- "${command[0]}" >/dev/null || fail "no command '${command[0]}' on $(uname -n)"
  else
    "$python" -m "$module" ${payload[@]+"${payload[@]}"} \
      --check="$((${nnodes:-1} * nproc_per_node))" || exit
  fi
  [[ $only == check ]] && exit 0
elif [[ ${#inside[@]}${#srun_options[@]}${#command[@]} == 000 ]]; then
  if [[ -z $torch_there ]] && command -v "$python" >/dev/null && ! has_torch "$python"; then
    fail "$(command -v "$python") has no torch and torchvision: $advice"
  fi
  # Said once here rather than by every rank; in a container only the ranks have a Python.
  ranks=${SLURM_NTASKS:-1}
  [[ -z $ntasks_per_node ]] || ranks=$((${nodes:-1} * ntasks_per_node))
  "$python" -m "$module" ${payload[@]+"${payload[@]}"} --check="$ranks" || exit
  [[ $only == check ]] && exit 0
fi
if [[ -n $in_allocation && -n $nproc_per_node ]]; then
  warn "--nproc-per-node has no effect in an allocation: srun starts the tasks that were asked for"
fi

if ((${#command[@]})); then
  size_command
  if [[ -n $only ]]; then
    show_command
    [[ $only == dry-run && -n $preflight && -n $in_allocation ]] || exit 0
  fi
fi
if [[ -n $nnodes && -z $given_attempt ]]; then become_node ${given[@]+"${given[@]}"}; fi
if [[ -z $only && -z $run_dir ]]; then
  name=${SLURM_JOB_ID:+job-$SLURM_JOB_ID}
  own_dir=${JOBKIT_LOGS:-$logs}/$place/${name:-run-$(date +%Y%m%d-%H%M%S)-$$}
  run_dir=$own_dir
fi

# A number for the next attempt: making its folder claims it, so that no two starts share one.
attempt='' outcome='' child=''
claim_attempt() {
  [[ -z $only ]] || return 0
  [[ ! -L $run_dir/attempts ]] || fail "$run_dir/attempts is a link, through which would be written: remove it"
  mkdir -p -- "$run_dir/attempts" 2>/dev/null
  [[ -d $run_dir/attempts && -w $run_dir/attempts ]] ||
    fail "$run_dir is not writable: choose another with --run-dir"
  attempt=${given_attempt:-0}
  if [[ -n $given_attempt ]]; then mkdir -p -- "$run_dir/attempts/$attempt" 2>/dev/null; fi
  until [[ -n $given_attempt ]] || mkdir -- "$run_dir/attempts/$attempt" 2>/dev/null; do
    [[ -d $run_dir/attempts/$attempt ]] || fail "$run_dir/attempts: cannot be written" 1
    ((attempt++ < 10000)) || fail "$run_dir/attempts: no new attempt can be made there" 1
  done
  outcome=$run_dir/attempts/$attempt/outcome.json
  echo "[jobkit] start: attempt $attempt of $run_dir on $(uname -n) at $(date +%Y-%m-%dT%H:%M:%S%z)" 2>/dev/null
}

# When a process began, in ticks since the boot; null where the kernel does not say.
start_of() {
  local stat='' words
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null
  read -r -a words <<<"${stat##*) }"
  echo "${words[19]:-null}"
}

# Who runs a single job, as a study's launcher notes it: with it `jobkit status` asks the process
# table or Slurm how a job ended that was killed. shared: the allocation has more than this run.
# A folder that --run-dir names may be a study's, whose launcher notes it; only what a run.sh left
# there, of a start before, is replaced.
# $child, where there is one, goes on if this shell is killed.
leave_job() {
  [[ -n $outcome ]] || return 0
  if [[ -z $own_dir ]]; then
    [[ -f $run_dir/job.json && ${node_rank:-0} == 0 ]] || return 0
    grep -qs -e '"launcher": "run\.sh"' -- "$run_dir/job.json" || return 0
  fi
  local id=null cluster=null shared=false host=${SLURMD_NODENAME:-$(uname -n)} started=null sees
  # One of several machines is started again by the process that leads it here: that is the run's.
  local own=$$
  [[ -z $given_attempt ]] || own=$PPID
  [[ -z $child ]] || started="{\"pid\": $child, \"pid_start\": $(start_of "$child")}"
  # A container may have the host's name, and processes of its own.
  sees=$(readlink "/proc/$$/ns/pid" 2>/dev/null)
  if [[ $sees =~ ^pid:\[[0-9]+\]$ ]]; then sees=\"$sees\"; else sees=null; fi
  if [[ -n $in_allocation ]]; then
    id=\"${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}\"
    [[ ${SLURM_TASK_PID-} == "$$" && -z ${SLURM_STEP_ID-} ]] || shared=true
    # Another cluster that sees this folder has other jobs of the same number.
    [[ ! ${SLURM_CLUSTER_NAME-} =~ ^[A-Za-z0-9._-]+$ ]] || cluster=\"$SLURM_CLUSTER_NAME\"
  fi
  printf '{"v": 1, "launcher": "run.sh", "job_id": %s, "cluster": %s, "shared": %s, "pid": %d, "pid_start": %s, "pid_ns": %s, "host": "%s", "child": %s}\n' \
    "$id" "$cluster" "$shared" "$own" "$(start_of "$own")" "$sees" "$host" "$started" >"$run_dir/job.json.$$" &&
    mv -f -- "$run_dir/job.json.$$" "$run_dir/job.json"
}

# A job's first attempt, also after it was requeued: with it the restarts are bounded over all.
first=''
first_attempt() {
  local kept=${outcome%/*/*}/first job=''
  [[ -n $outcome ]] || return 0
  if ((${SLURM_RESTART_COUNT:-0})) && [[ -r $kept ]]; then read -r job first <"$kept"; fi
  [[ $job == "$SLURM_JOB_ID" && $first =~ ^[0-9]{1,6}$ ]] || first=$attempt
  # Two clusters give the same numbers: what else Slurm says of this job is for `jobkit cancel`.
  printf '%s\n' "$SLURM_JOB_ID $first" "${of_job#*|}" >"$kept"
}

# Whether the run failed in a way that another start may mend: not by bad input, and not on request.
crashed() {
  case $code in 0 | 2 | 75 | 126 | 127 | 129 | 130 | 138 | 140 | 143) return 1 ;; esac
  [[ -z $only ]]
}

# What the payload gets in this attempt.
words=()
gather_words() {
  if ((${#command[@]})); then prepare_command && return; fi
  words=(${payload[@]+"${payload[@]}"})
  [[ -n $only ]] || words+=(--run-dir "$run_dir" --attempt "$attempt")
}

# Becomes srun, which starts a module of jobkit as one task a rank. To be called in a subshell: the
# signal that is handed on to it would end a shell that waits for srun.
on_every_rank() {
  # Options that a job inherits and that would contradict those given here.
  unset SLURM_TRES_PER_TASK
  # An interactive shell is a step itself, whose binding is not for the ranks.
  if [[ -n ${SLURM_STEP_ID-} ]]; then
    unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_GPU_BIND
  fi
  local size=() bind=''
  # With GPUs per task srun shows each rank its own only: then NCCL cannot copy between them by
  # NVLink. The ranks take theirs by local rank, and refuse to share one.
  [[ -z ${SLURM_GPUS_PER_TASK-} || -n ${SLURM_GPU_BIND-} ]] || bind=none
  if [[ -n $ntasks_per_node ]]; then # a part of the allocation
    size=(--nodes="${nodes:-1}" --ntasks="$((${nodes:-1} * ntasks_per_node))"
      --ntasks-per-node="$ntasks_per_node")
  fi
  # Without --kill-on-bad-exit the ranks that are left would wait forever. Never --unbuffered:
  # srun then tears lines. cpus-per-task said again: srun does not inherit it.
  exec srun --kill-on-bad-exit=1 --wait=60 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    ${bind:+--gpu-bind=$bind} ${size[@]+"${size[@]}"} ${srun_options[@]+"${srun_options[@]}"} \
    ${inside[@]+"${inside[@]}"} "$python" -m "$@"
}

# Starts a function, which becomes a program, in the background as $child. bash 5.2 forgets the code
# of a child that ends just as a signal interrupts `wait`; so a shell between the two, which waits
# for it in the foreground, hands the code on by a pipe.
code=0
start_child() {
  if ((BASH_VERSINFO[0] < 4)) || ! { exec 9<> <(:); } 2>/dev/null; then
    "$@" 9>&- &
    middle=$! child=$! piped=''
    return
  fi
  piped=1
  {
    trap : USR1 USR2 TERM INT HUP
    (echo "$BASHPID" >&9 && trap - USR1 USR2 TERM INT HUP && exec 2>&8 8>&- 9>&- && "$@")
    echo "$?" >&9
  } 8>&2 2>/dev/null & # where bash would say which signal ended the child
  middle=$!
  until read -r child <&9; do :; done
}

# Waits for $child to end, whatever signals come; its code goes into $code.
wait_for_child() {
  local own=''
  # bash handles a signal that comes just before it begins to wait only after that: hence a limit.
  while [[ -n $piped && -z $own ]] && kill -0 "$middle" 2>/dev/null; do
    { read -r -t 1 own <&9; } 2>/dev/null
  done
  while :; do
    wait "$middle"
    code=$?
    kill -0 "$middle" 2>/dev/null || break
  done
  { [[ -n $own ]] || read -r -t 2 own <&9; } 2>/dev/null
  code=${own:-$code}
  { exec 9>&-; } 2>/dev/null
}

# The outcome that the payload left says more than a launcher's code can.
judge_code() {
  if ((${#command[@]})); then judge_command && return; fi
  [[ -f $outcome ]] || return 0
  local said
  # A key stands after { or a comma, and a text's own quotes have a backslash before them: so this
  # finds the one key of that name wherever it stands, without a Python, which a host may not have.
  said=$(tr '\n' ' ' <"$outcome" | sed -n 's/.*[{,] *"exit_code" *: *\([0-9]\{1,3\}\) *[,}].*/\1/p')
  if ((code && ${said:-1} == 0)); then
    warn "the launcher ended with code $code after the run had recorded its success: the results stand, the log says what crashed"
  fi
  code=${said:-$code}
}

start_in_allocation() {
  # Only this one signal is trapped: bash loses it beside a trap of CONT, which Slurm sends with it.
  # Slurm tells the ranks itself; a site or a user may tell this shell, which hands it on.
  trap 'kill -'"$stop_signal"' "$child" 2>/dev/null' "$stop_signal"
  if ((${#command[@]})); then
    start_child command_on_slurm
  else
    start_child on_every_rank "$module" ${words[@]+"${words[@]}"}
  fi
  local watch=''
  if [[ -n $outcome && ${#command[@]} == 0 ]]; then
    end_stuck_srun &
    watch=$!
  fi
  wait_for_child
  [[ -z $watch ]] || kill "$watch" 2>/dev/null
}

# The run has ended, and srun waits for a node that it cannot reach: it would do so to the time limit.
end_stuck_srun() {
  # A sleep that outlives this shell by a moment must not keep what reads its output waiting.
  until [[ -f $outcome ]]; do sleep 5 >&- 2>&-; done
  sleep 90 >&- 2>&- # srun's own --wait comes first
  warn "the run has ended, and srun has not 90 s later (a node that it cannot reach?): ending srun"
  kill -KILL "$child" 2>/dev/null
}

# Seconds as torchrun takes them: a whole number, rounded up.
whole_seconds() {
  local whole=$((10#${1%%.*}))
  [[ ! $1 =~ \.0*[1-9] ]] || ((++whole))
  echo "$whole"
}

# Becomes torchrun, for jobkit's own training. To be called in a subshell.
# shellcheck disable=SC2317  # called by start_child
training_here() {
  local meet=(--standalone --local-addr 127.0.0.1 --rdzv-conf "join_timeout=$(whole_seconds "$start_timeout")")
  [[ -z $nnodes ]] || torchrun_nodes
  exec "$python" -m torch.distributed.run "${meet[@]}" --nproc-per-node "$nproc_per_node" \
    --monitor-interval "$monitor_interval" -m "$module" ${words[@]+"${words[@]}"}
}

start_here() {
  if [[ -z ${OMP_NUM_THREADS-} ]]; then # torchrun would set 1, and warn
    threads=$(($(nproc) / nproc_per_node))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
  fi
  # Without a folder there is no outcome to read, and the ranks' own codes count.
  [[ -n $outcome ]] && export JOBKIT_READS_OUTCOME=1
  if [[ -n $shutdown_timeout ]]; then
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$(whole_seconds "$shutdown_timeout")
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT
  fi
  # One machine's ranks need no other address than its own; a host name may resolve to none.
  if [[ -z $nnodes && $(uname) == Linux ]]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
  if ((${#command[@]})); then
    start_child command_here
  else
    start_child training_here
  fi
  leave_job
  [[ -z $stopped ]] || kill -TERM "$child" 2>/dev/null
  if [[ -n $warned ]]; then warn_ranks; fi
  wait_for_child
  child=''
}

# torchrun would end of the warning: it is for the ranks, which are its children.
# shellcheck disable=SC2317  # called by a trap
warn_ranks() {
  if [[ -z $child ]]; then warned=1; return; fi
  if [[ -n $launcher && $launcher != torchrun ]]; then # it hands the warning on
    kill -"$stop_signal" "$child" 2>/dev/null
    return
  fi
  # shellcheck disable=SC2046  # one argument per process id
  kill -"$stop_signal" $(cat "/proc/$child/task"/*/children 2>/dev/null) 2>/dev/null
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
  # The counter of a node's energy counts what every job there uses: the ranks read it where no
  # other job can be, which they cannot see themselves.
  unset JOBKIT_NODE_ALONE
  # An array's last element has the number of the array, of which squeue shows all elements.
  of_job=$(TZ=UTC0 SLURM_TIME_FORMAT=standard timeout 15 \
    squeue -h -j "$SLURM_JOB_ID" -o '%A|%h|%V|%j|%Z' 2>/dev/null |
    sed -n "/^$SLURM_JOB_ID|/{s///p;q;}")
  if [[ $of_job == NO* ]]; then export JOBKIT_NODE_ALONE=1; fi
  claim_attempt
  first_attempt
  leave_job
  gather_words
  if [[ -n $preflight ]]; then
    checked=(${words[@]+"${words[@]}"})
    ((${#command[@]} == 0)) || checked=(--dataset synthetic) # its data are its own
    # Only the ranks know it, so that no other user of the nodes can pass for one of them.
    (JOBKIT_PREFLIGHT_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n') && export JOBKIT_PREFLIGHT_SECRET
    on_every_rank jobkit.checks.preflight.cli ${run_dir:+--run-dir "$run_dir"} -- \
      ${checked[@]+"${checked[@]}"}) || fail "preflight failed: nothing was trained" 5
    if [[ -n $only ]] && ((${#command[@]})); then exit 0; fi
  fi
  while :; do
    start_in_allocation
    judge_code
    if ! crashed || ((attempt - first >= ${max_restarts:-0})); then break; fi
    warn "attempt $attempt ended with code $code: starting the run again ($((attempt - first + 1)) of $max_restarts)"
    export JOBKIT_RESTARTS=$((attempt - first + 1))
    claim_attempt
    gather_words
  done
  if ((code == 75)); then
    restarts=${SLURM_RESTART_COUNT:-0}
    if ((restarts >= ${max_restarts:-3})); then
      warn "stopped early, and requeued $restarts times already (--max-restarts): not again"
    else
      echo "[jobkit] stopped early with a checkpoint: requeueing job $SLURM_JOB_ID at $(date +%Y-%m-%dT%H:%M:%S%z)"
      # An array's last element has the job id of the array, which would requeue all of it.
      scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}" || warn "Slurm did not requeue the job: submit it again with --run-dir $run_dir"
    fi
  fi
else
  # The ranks run in the background, so that a signal reaches this shell at once and can be handed
  # on: INT as TERM, because a shell has its background commands ignore INT.
  stopped='' warned=''
  trap 'stopped=143; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null' TERM HUP
  trap 'stopped=130; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null' INT
  trap warn_ranks "$stop_signal"
  for ((restarts = 0; ; restarts++)); do
    # A node of several was told it.
    [[ -n $given_attempt ]] || export JOBKIT_RESTARTS=$restarts # the payload asks whether what it did before counts
    claim_attempt
    ((restarts)) || leave_job
    gather_words
    start_here
    warned=''
    if [[ -n $stopped ]]; then
      # A pod ends by TERM and may be replaced: its code says whether there is a checkpoint.
      if ((${#command[@]})) || [[ -n ${JOBKIT_POD-} ]]; then judge_code; fi
      [[ -z ${JOBKIT_POD-} || ! $code =~ ^(0|75)$ ]] || stopped=$code
      code=$stopped
      exit "$code"
    fi
    judge_code
    case $code in 0 | 2 | 126 | 127) break ;; esac # another start would not mend it
    ((restarts < ${max_restarts:-0})) || break
    warn "attempt $attempt ended with code $code: starting the run again ($((restarts + 1)) of ${max_restarts})"
  done
fi
# Bad input leaves nothing behind in a folder that nobody asked for.
if ((code == 2)) && [[ -n $own_dir && ! -e $own_dir/spec.json ]]; then rm -rf -- "$own_dir"; fi
exit "$code"
