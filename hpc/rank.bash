#!/usr/bin/env bash
# One rank of a command. jobkit.launch.supervise hands this text to the ranks, so that a container
# needs bash and nothing else:   bash -c TEXT jobkit slurm|torchrun|once|here COMMAND...
# It gives the rank its place, hands signals on, and notes how the command ended.
signals=(USR1 USR2 TERM INT HUP) child='' early='' hears='' code=''

# torchrun's variables for a task of a Slurm step; LOCAL_WORLD_SIZE and MASTER_PORT are set already.
rank_place() {
  local list=${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST} host='' # as n[1-3,7]-ib,m4
  local part='^([^][,]*)(\[([0-9]+)[^]]*\])?(.*)$'
  while [[ $list =~ $part && -n ${BASH_REMATCH[1]}${BASH_REMATCH[2]} ]]; do
    host+=${BASH_REMATCH[1]}${BASH_REMATCH[3]} list=${BASH_REMATCH[4]}
  done
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
  export WORLD_SIZE=${SLURM_STEP_NUM_TASKS:-$SLURM_NTASKS}
  export MASTER_ADDR=${MASTER_ADDR:-$host${JOBKIT_INTERFACE_SUFFIX-}}
}

# The first rank that writes it says how the attempt ended: the others end because of that one.
rank_say() {
  local file=$JOBKIT_RUN_DIR/attempts/$JOBKIT_ATTEMPT/$1
  (set -o noclobber && printf '%s\n' "$2" >"$file") 2>/dev/null
  [[ -e $file ]]
}

# Hands a signal on to the command, or keeps it until rank_hear is there. A warning is noted.
rank_tell() {
  if [[ -z $hears ]]; then early+=" $1"; return; fi
  { echo "$1" >&7; } 2>/dev/null || kill -"$1" "$child" 2>/dev/null
  [[ $1 != USR? ]] || rank_say warned "$1"
}

# Slurm with proctrack/cgroup and torchrun's agent signal this shell alone. proctrack/pgid signals
# its process group, with the command and this co-process, which therefore knows what came twice.
rank_hear() {
  local name had=''
  # shellcheck disable=SC2064  # the name is of now
  for name in "${signals[@]}"; do trap "had+=' $name'" "$name"; done
  while read -r name || (($? > 128)); do
    [[ -n $name ]] || continue
    if [[ $had != *" $name"* ]]; then kill -"$name" "$child"; fi
    had=${had// $name/}
  done
}

# Runs the command to its end, whatever signals come. bash 5.2 forgets the code of a child that ends
# just as a signal interrupts `wait`: a shell between the two tells pid and code by a pipe.
rank_wait() {
  local name middle
  # shellcheck disable=SC2064  # the name is of now
  for name in "${signals[@]}"; do trap "rank_tell $name" "$name"; done
  trap : PIPE
  exec 8>&2 9<> <(:)
  {
    trap : "${signals[@]}"
    (echo "$BASHPID" >&9 && trap - "${signals[@]}" && exec 2>&8 8>&- 9>&- && exec "$@")
    echo "$?" >&9
  } 2>/dev/null & # where bash would say which signal ended the command
  middle=$!
  until read -r child <&9; do :; done
  exec 7> >(exec 8>&- 9>&- && rank_hear >/dev/null 2>&1)
  hears=1
  for name in $early; do rank_tell "$name"; done
  # A signal that comes just before a wait is handled only after it: hence the limit.
  while [[ -z $code ]] && kill -0 "$middle" 2>/dev/null; do read -r -t 1 code <&9; done 2>/dev/null
  # Its end is written or never will be; a signal that comes now interrupts the read.
  until [[ -n $code ]] || ! read -r -t 0 <&9; do read -r -t 1 code <&9; done
  code=${code:-137}
}

rank_run() {
  local who name ended
  case $1 in
    slurm) rank_place ;;
    here) export "${@:2:7}" && shift 7 ;; # the variables of its place
    torchrun) export NODE_RANK=${GROUP_RANK:-0} ;;
    once) # Slurm's variables of this one task are not those of what the command starts
      unset "${!SLURM_STEP_@}" "${!SLURM_CPU_BIND@}" SLURM_PROCID SLURM_LOCALID SLURM_NODEID \
        SLURM_NTASKS SLURM_NPROCS SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_NODE
      if [[ -n ${SLURM_JOB_NUM_NODES-} ]]; then export SLURM_NNODES=$SLURM_JOB_NUM_NODES; fi ;;
  esac
  shift
  who=${RANK:+rank $RANK: }
  export PYTHONPATH=$JOBKIT_PYTHONPATH
  unset PYTHONSAFEPATH JOBKIT_PYTHONPATH # a script finds the modules beside it
  if ! type -P -- "$1" >/dev/null; then
    name=$(printf '%q' "$1")
    rank_say failed "127 ${who}no command $name on $(uname -n)"
    if [[ ${RANK:-0} == 0 ]]; then echo "jobkit: error: no command $name on $(uname -n)" >&2; fi
    return 127
  fi
  rank_wait "$@"
  # 75 is not yet the end of the others, which may still save: srun and torchrun would end them.
  if ((code == 75)); then rank_say preempted "${who}exit code 75" && return 0; fi
  ((code)) || return 0
  name=$( ((code > 128)) && kill -l $((code - 128)) 2>/dev/null)
  ended=${name:+ended by SIG$name}
  if [[ $name == USR? ]]; then
    ended="ended by the stop signal, SIG$name, which the command does not handle"
  fi
  rank_say failed "$code $who${ended:-exit code $code}"
  return "$code"
}

rank_run "$@"
