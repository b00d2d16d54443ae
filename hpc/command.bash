#!/usr/bin/env bash
# How run.sh starts a command of the user's: sourced by run.sh, and by nothing else. The functions
# whose names begin with rank_ are handed to the ranks as text, so that a container needs only bash.
# shellcheck disable=SC2154  # run.sh sets python, logs and the like

# --- in each rank ---------------------------------------------------------------------------------

# The first host of a Slurm list such as n[1-3,7]-ib,m4: no scontrol, which a container lacks.
rank_first_host() {
  local list=$1 host=''
  while [[ -n $list && $list != ,* ]]; do
    if [[ $list == \[* ]]; then
      list=${list#\[}
      host+=${list%%[],-]*}
      list=${list#*]}
    else
      host+=${list%%[[,]*}
      list=${list#"${list%%[[,]*}"}
    fi
  done
  printf '%s' "$host"
}

# A port for the ranks of a step to meet at: from the job, its start and the step, and outside the
# range from which the system takes ports for itself.
rank_port() {
  local low=32768 high=60999 seed below above
  { read -r low high </proc/sys/net/ipv4/ip_local_port_range; } 2>/dev/null
  seed=$((SLURM_JOB_ID * 31 + ${SLURM_RESTART_COUNT:-0} * 7919 + ${SLURM_STEP_ID:-0} * 101))
  below=$((low - 10000)) above=$((65535 - high))
  if ((below > 0 && below >= above)); then
    echo $((10000 + seed % below))
  else
    echo $((above > 0 ? high + 1 + seed % above : 29500))
  fi
}

# The ranks on this node, from a text such as 4(x2),3.
rank_count_here() {
  local part count=1 times node=0
  for part in ${1//,/ }; do
    count=${part%%(*} times=1
    if [[ $part == *x* ]]; then times=${part##*x} times=${times%)}; fi
    ((node += times))
    if ((node > SLURM_NODEID)); then break; fi
  done
  echo "$count"
}

# torchrun's variables for a task of a Slurm step.
rank_place() {
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
  export WORLD_SIZE=${SLURM_STEP_NUM_TASKS:-$SLURM_NTASKS} LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
  LOCAL_WORLD_SIZE=$(rank_count_here "${SLURM_STEP_TASKS_PER_NODE:-$WORLD_SIZE}")
  MASTER_ADDR=${MASTER_ADDR:-$(rank_first_host "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}")${JOBKIT_INTERFACE_SUFFIX-}}
  MASTER_PORT=${MASTER_PORT:-$(rank_port)}
}

# The first rank that writes it says how the attempt ended: the others end because of that one.
rank_say() {
  (set -o noclobber && printf '%s\n' "$2" >"$JOBKIT_RUN_DIR/attempts/$JOBKIT_ATTEMPT/$1") 2>/dev/null
  [[ -e $JOBKIT_RUN_DIR/attempts/$JOBKIT_ATTEMPT/$1 ]]
}

# Hands a signal on to the command, or keeps it until rank_hear is there.
rank_tell() {
  if [[ -z $hears ]]; then early+=" $1"; return; fi
  { echo "$1" >&7; } 2>/dev/null || kill -"$1" "$child" 2>/dev/null
}

# Who signals a rank may mean this shell alone (Slurm with proctrack/cgroup; torchrun's agent) or all
# its process group, in which the command is (proctrack/pgid): of a group this process is one too.
# Hands on what the shell writes, and what the command has not had: so it gets each signal once.
rank_hear() {
  # shellcheck disable=SC2034  # read by name
  local name had_USR1='' had_USR2='' had_TERM='' had_INT='' had_HUP=''
  for name in USR1 USR2 TERM INT HUP; do
    # shellcheck disable=SC2064  # the name is of now
    trap "had_$name=1" "$name"
  done
  while read -r name || (($? > 128)); do
    local had=had_$name
    if [[ -n $name && -z ${!had} ]]; then kill -"$name" "$child"; fi
    printf -v "$had" ''
  done
}

# One rank: a place (slurm: from the step's variables; once: none; else set already), and the
# command.
rank_run() {
  local place=$1 who name
  shift
  case $place in
    slurm) rank_place ;;
    once) # Slurm's variables of this one task are not those of what the command starts
      unset "${!SLURM_STEP_@}" "${!SLURM_CPU_BIND@}" SLURM_PROCID SLURM_LOCALID SLURM_NODEID \
        SLURM_NTASKS SLURM_NPROCS SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_NODE
      if [[ -n ${SLURM_JOB_NUM_NODES-} ]]; then export SLURM_NNODES=$SLURM_JOB_NUM_NODES; fi ;;
    torchrun) export NODE_RANK=${GROUP_RANK:-0} ;;
  esac
  who=${RANK:+rank $RANK: }
  export PYTHONPATH=$JOBKIT_PYTHONPATH
  # A script finds the modules beside it, as it does without jobkit.
  unset PYTHONSAFEPATH JOBKIT_PYTHONPATH
  if ! type -P -- "$1" >/dev/null; then
    name=$(printf '%q' "$1")
    rank_say failed "127 ${who}no command $name on $(uname -n)"
    if [[ ${RANK:-0} == 0 ]]; then echo "jobkit: error: no command $name on $(uname -n)" >&2; fi
    return 127
  fi
  child='' early='' hears=''
  for name in USR1 USR2 TERM INT HUP; do
    # shellcheck disable=SC2064  # the name is of now
    trap "rank_tell $name" "$name"
  done
  trap : PIPE
  start_child exec "$@"
  { exec 7> >(rank_hear >/dev/null 9>&-); } 2>/dev/null
  hears=1
  for name in $early; do rank_tell "$name"; done
  wait_for_child
  case $code in
    0) return 0 ;;
    75) # not yet the end of the others, which may still save: srun and torchrun would end them
      rank_say preempted "${who}exit code 75" && return 0 ;;
    *)
      name=$( ((code > 128)) && kill -l $((code - 128)) 2>/dev/null)
      if [[ -z $name ]]; then
        rank_say failed "$code ${who}exit code $code"
      elif [[ $name == "${JOBKIT_STOP_SIGNAL-}" ]]; then
        rank_say failed "$code ${who}ended by the stop signal, SIG$name, which the command does not handle"
      else
        rank_say failed "$code ${who}ended by SIG$name"
      fi ;;
  esac
  return "$code"
}

# One node's agent of torchrun, with a c10d rendezvous on the first node.
rank_agent() {
  local python=$1 ranks=$2 here threads dollar='$$' # torchrun reads $$ as $, and $local_rank
  shift 2
  rank_place
  here=${SLURMD_NODENAME:-$(uname -n)}${JOBKIT_INTERFACE_SUFFIX-}
  if [[ -z ${OMP_NUM_THREADS-} ]] && threads=$(nproc 2>/dev/null); then # torchrun would set 1
    export OMP_NUM_THREADS=$((threads > ranks ? threads / ranks : 1))
  fi
  # torchrun would end of these two, which are for its ranks. They have sessions of their own: no
  # signal to the agent's process group reaches them.
  trap '' USR1 USR2
  local hand_on='
import os, runpy, signal, sys
def tell(number, frame):
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                for pid in map(int, file.read().split()):
                    if os.getsid(pid) != os.getsid(0):
                        os.kill(pid, number)
        except OSError:  # it has just ended
            pass
signal.signal(signal.SIGUSR1, tell)
signal.signal(signal.SIGUSR2, tell)
try:
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
except Exception as error:
    number = getattr(error, "sigval", None)
    if number is None:
        raise
    sys.exit(128 + number)  # as any program that a signal ended: torchrun has handed it on'
  local meet=(--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID.$JOBKIT_ATTEMPT")
  meet+=(--rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --local-addr "$here")
  # One node may load torch minutes after another, from a file system that all of them read.
  meet+=(--rdzv-conf "is_host=$((SLURM_NODEID == 0)),join_timeout=600,read_timeout=600")
  set -- -c "$hand_on" --nnodes "$WORLD_SIZE" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$ranks" "${meet[@]}" --no-python "${@//\$/$dollar}"
  unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT
  exec "$python" "$@"
}

# --- in run.sh ------------------------------------------------------------------------------------

# A text as what stands between the quotes of a JSON string.
json_text() {
  local LC_ALL=C text=$1 out='' char at
  text=${text//\\/\\\\} text=${text//\"/\\\"}
  text=${text//$'\n'/\\n} text=${text//$'\t'/\\t} text=${text//$'\r'/\\r}
  if [[ $text == *[$'\x01'-$'\x1f'$'\x7f']* ]]; then
    for ((at = 0; at < ${#text}; at++)); do
      char=${text:at:1}
      if [[ $char == [$'\x01'-$'\x1f'$'\x7f'] ]]; then printf -v char '\\u%04x' "'$char"; fi
      out+=$char
    done
    text=$out
  fi
  printf '%s' "$text"
}

write_beside() { # atomically: FILE TEXT; other machines may do so too
  local new=$1.${node_rank:-0}.$$
  printf '%s\n' "$2" >"$new" && mv -f -- "$new" "$1"
}

# What the command gets besides the rank's place. A study's launcher has left spec.json already.
prepare_command() {
  [[ $run_dir == /* ]] || run_dir=$PWD/$run_dir
  [[ $outcome == /* ]] || outcome=$PWD/$outcome
  local part kept='' word text='' auto=$root/src/jobkit/program/auto
  export JOBKIT_RUN_DIR=$run_dir JOBKIT_RUN_ID=${run_dir##*/} JOBKIT_STUDY JOBKIT_ATTEMPT=$attempt
  export JOBKIT_WARMUP_STEPS=$warmup_steps JOBKIT_WHY=$why JOBKIT_STOP_SIGNAL=$stop_signal JOBKIT_PYTHONPATH
  JOBKIT_STUDY=${run_dir%/*} JOBKIT_STUDY=${JOBKIT_STUDY##*/}
  unset JOBKIT_UNIT JOBKIT_WORK_PER_STEP JOBKIT_AUTO JOBKIT_READS_OUTCOME
  [[ -z $unit ]] || export JOBKIT_UNIT=$unit
  [[ -z $work_per_step ]] || export JOBKIT_WORK_PER_STEP=$work_per_step
  # The user's own folders stay first; jobkit, for its meter, comes last.
  while IFS= read -r -d: part; do
    [[ -z $part || $part == "$root/src" || $part == "$auto" ]] || kept+=$part:
  done <<<"$PYTHONPATH:"
  JOBKIT_PYTHONPATH=$kept$root/src
  if [[ -z $no_auto ]]; then
    export JOBKIT_AUTO=1
    [[ ! -d $auto ]] || JOBKIT_PYTHONPATH=$auto:$JOBKIT_PYTHONPATH
  fi
  if [[ ! -e $run_dir/spec.json ]]; then
    for word in "${command[@]}"; do text+=", \"$(json_text "$word")\""; done
    write_beside "$run_dir/spec.json" "$(printf \
      '{"v": 1, "study": "%s", "run_id": "%s", "spec": {"command": [%s], "launcher": "%s", "nodes": %d, "ranks_per_node": %d}}' \
      "$(json_text "$JOBKIT_STUDY")" "$(json_text "$JOBKIT_RUN_ID")" "${text#, }" "$launcher" \
      "$command_nodes" "$command_ranks")"
  fi
}

# What is wrong with the options of a command ends here. Sets their defaults.
check_command() {
  local at
  why=5
  for ((at = 0; at < ${#payload[@]}; at++)); do
    case ${payload[at]} in
      --stop-signal) ((++at)) ;; # run.sh has its value
      --why) why=${payload[++at]-} ;;
      --why=*) why=${payload[at]#*=} ;;
      --stop-signal=* | --dry-run | --check | --check=*) ;;
      *) fail "unknown option ${payload[at]}: after -- comes the command with its own options" ;;
    esac
  done
  [[ $place == single ]] || fail "--comm measures instead of a command: give one of them"
  launcher=${launcher:-srun} warmup_steps=${warmup_steps:-5}
  [[ $launcher =~ ^(srun|torchrun|once)$ ]] || fail "--launcher $launcher: must be srun, torchrun or once"
  [[ $warmup_steps =~ ^[0-9]{1,9}$ ]] || fail "--warmup-steps $warmup_steps: must be a whole number, 0 or more"
  [[ $why =~ ^[0-9]{1,4}$ ]] || fail "--why $why: must be a whole number of steps, 0 or more"
  [[ -z $work_per_step || $work_per_step =~ ^[0-9]+(\.[0-9]+)?([eE][+]?[0-9]{1,2})?$ ]] ||
    fail "--work-per-step $work_per_step: must be a number above 0"
  [[ -z $work_per_step || -n $unit ]] || fail "--work-per-step needs --unit beside it, as --unit images"
  [[ $unit != *[[:cntrl:]]* ]] || fail "--unit: has a control character"
}

# --dry-run and --check: what would be started.
show_command() {
  local ranks=$((command_nodes * command_ranks)) shown
  printf -v shown '%q ' "${command[@]}"
  [[ $only == check ]] || echo "$launcher, $ranks rank(s) on $command_nodes node(s): ${shown% }"
}

# The size of the run, from the options and Slurm's variables.
size_command() {
  command_nodes=${nnodes:-1} command_ranks=$nproc_per_node
  [[ -n $in_allocation ]] || return 0
  command_nodes=${nodes:-${SLURM_JOB_NUM_NODES:-1}}
  command_ranks=${ntasks_per_node:-${SLURM_NTASKS_PER_NODE-}}
  [[ -z $command_ranks ]] || return 0
  ((${SLURM_NTASKS:-command_nodes} % command_nodes == 0)) ||
    fail "$SLURM_NTASKS tasks on $command_nodes nodes: give --nodes and --ntasks-per-node, and not --ntasks"
  command_ranks=$((${SLURM_NTASKS:-command_nodes} / command_nodes))
}

# The words that start one rank: a shell with the functions above, as text.
rank_words() {
  rank=(bash -c "$(declare -f start_child wait_for_child "${!rank_functions[@]}")"$'\nchild="" early="" code=0\n'"$1"' "$@"' jobkit)
}
declare -A rank_functions=([rank_first_host]=1 [rank_port]=1 [rank_count_here]=1 [rank_place]=1
  [rank_say]=1 [rank_tell]=1 [rank_hear]=1 [rank_run]=1 [rank_agent]=1)

# torchrun of the Python that the command itself names, else of the one on PATH.
torchrun_python() {
  [[ ${command[0]##*/} =~ ^python[0-9.]*$ ]] && echo "${command[0]}" || echo "$python"
}

# Becomes srun in an allocation. To be called in a subshell, as on_every_rank is.
command_on_slurm() {
  # A rank that has ended well leaves the others their time: --wait=0.
  local size=(--nodes="$command_nodes") more=(--kill-on-bad-exit=1 --wait=0)
  unset SLURM_TRES_PER_TASK
  case $launcher in
    srun)
      rank_words 'rank_run slurm'
      size+=(--ntasks="$((command_nodes * command_ranks))" --ntasks-per-node="$command_ranks") ;;
    torchrun) # each node's one task has all that the node has
      unset SLURM_GPUS_PER_TASK SLURM_CPUS_PER_TASK
      rank_words 'rank_run torchrun'
      local worker=("${rank[@]}")
      rank_words 'rank_agent'
      rank+=("$(torchrun_python)" "$command_ranks" "${worker[@]}")
      size+=(--ntasks="$command_nodes" --ntasks-per-node=1) more+=(--cpu-bind=none) ;;
    once) # shared, so that the command may start steps of its own
      unset SLURM_GPUS_PER_TASK SLURM_CPUS_PER_TASK
      rank_words 'rank_run once'
      size=(--nodes=1 --ntasks=1 --ntasks-per-node=1) more+=(--cpu-bind=none --overlap) ;;
  esac
  if [[ -n ${SLURM_STEP_ID-} ]]; then
    unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_GPU_BIND
  fi
  # GPUs are not split between the tasks: NCCL copies between those of a node by NVLink.
  [[ -z ${SLURM_GPUS_PER_TASK-} || -n ${SLURM_GPU_BIND-} ]] || more+=(--gpu-bind=none)
  exec srun "${more[@]}" ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${size[@]}" \
    ${srun_options[@]+"${srun_options[@]}"} ${inside[@]+"${inside[@]}"} "${rank[@]}" "${command[@]}"
}

# Becomes what starts the ranks on this machine. To be called in a subshell.
command_here() {
  case $launcher in
    srun)
      rank_words 'rank_run here'
      exec "$python" -m jobkit.launch.local.ranks --ranks "$nproc_per_node" \
        --poll "$monitor_interval" ${shutdown_timeout:+--shutdown-timeout "$shutdown_timeout"} \
        ${nnodes:+--node-rank "$node_rank" --nnodes "$nnodes"} -- "${rank[@]}" "${command[@]}" ;;
    torchrun)
      rank_words 'rank_run torchrun'
      local dollar='$$' # torchrun reads $$ as $, and $local_rank
      rank=("${rank[@]//\$/$dollar}")
      local meet=(--standalone --rdzv-conf "join_timeout=$(whole_seconds "$start_timeout")")
      [[ -z $nnodes ]] || torchrun_nodes
      exec "$(torchrun_python)" -m torch.distributed.run "${meet[@]}" \
        --nproc-per-node "$nproc_per_node" --monitor-interval "$monitor_interval" --no-python "${rank[@]}" "${command[@]//\$/$dollar}" ;;
    once)
      rank_words 'rank_run once'
      exec "${rank[@]}" "${command[@]}" ;;
  esac
}

# outcome.json from what the ranks said and the launcher's code; $code becomes the run's.
judge_command() {
  local folder=${outcome%/*} status=ok reason='' said=''
  if [[ -s $folder/failed ]]; then
    { read -r said reason <"$folder/failed"; } 2>/dev/null
    [[ $said =~ ^[0-9]{1,3}$ ]] || said=1 # (( )) would evaluate any other text of the file
    code=$said status=failed
  elif [[ -e $folder/preempted && ($code =~ ^(0|75|130|143)$ || -n ${stopped-}) ]]; then
    reason=$(<"$folder/preempted")
    code=75 status=preempted
  elif ((code)); then
    status=failed reason="$launcher ended with exit code $code"
  fi
  # One of several machines is ended where another's rank failed: the process that leads them says.
  [[ $status != failed || -z $given_attempt || ! $code =~ ^(129|130|143)$ ]] || return 0
  write_beside "$outcome" "$(printf \
    '{"exit_code": %d, "status": "%s", "reason": "%s", "run_id": "%s", "attempt": %d}' \
    "$code" "$status" "$(json_text "${reason:0:2000}")" "$(json_text "$JOBKIT_RUN_ID")" "$attempt")"
}
