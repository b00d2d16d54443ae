#!/usr/bin/env bash
# One run on several machines without Slurm: sourced by run.sh, and by nothing else. run.sh becomes
# jobkit.launch.local.nodes, which starts run.sh once more, as one node of a run.
# shellcheck disable=SC2154  # run.sh sets python, logs and the like

# What is wrong with the options ends here.
check_nodes() {
  local own low high
  [[ -z $in_allocation ]] ||
    fail "--nnodes and the like are for machines without Slurm: in an allocation srun starts all nodes"
  [[ -n $nnodes ]] || fail "--node-rank, --master-addr and --master-port need --nnodes beside them"
  for own in "nnodes 1 9999" "node_rank 0 9998" "master_port 1 65535"; do
    read -r own low high <<<"$own"
    [[ -n ${!own} || $own == master_port ]] || fail "--nnodes needs --${own//_/-} beside it"
    if [[ ! ${!own:-$low} =~ ^(0|[1-9][0-9]{0,4})$ ]] || ((${!own:-$low} < low || ${!own:-$low} > high)); then
      fail "--${own//_/-} ${!own}: must be a whole number from $low to $high"
    fi
  done
  ((node_rank < nnodes)) || fail "--node-rank $node_rank: must be below --nnodes, which is $nnodes"
  [[ $master_addr =~ ^[A-Za-z0-9:][A-Za-z0-9._:%-]*$ ]] ||
    fail "--master-addr '$master_addr': must be the name or address of the machine with --node-rank 0"
  [[ $launcher != once ]] || fail "--launcher once: the command starts its own ranks on all machines"
  [[ $place == single ]] || fail "--comm measures in an allocation or on one machine, and not with --nnodes"
}

# Becomes what starts run.sh as one of the nodes: with these words, after run.sh's own.
become_node() {
  local own=(--nnodes "$nnodes" --node-rank "$node_rank" --master-addr "$master_addr")
  own+=(--ranks "$nproc_per_node" --logs "${JOBKIT_LOGS:-$logs}/$place" --start-timeout "$start_timeout")
  [[ -z $master_port ]] || own+=(--master-port "$master_port")
  [[ -z $max_restarts ]] || own+=(--max-restarts "$max_restarts")
  # Longer than torchrun's own 30 s: its ranks have sessions of their own, and would be left.
  if ((${#command[@]})) && [[ $launcher != torchrun ]]; then local grace=15; else local grace=30; fi
  own+=(--shutdown-timeout "${shutdown_timeout:-$grace}")
  [[ -z $run_dir ]] || own+=(--run-dir "$run_dir")
  exec "$python" -m jobkit.launch.local.nodes "${own[@]}" -- bash "${BASH_SOURCE[1]}" "$@"
}

# The words with which torchrun meets the other nodes' agents: the first node has rank 0.
torchrun_nodes() {
  meet=(--nnodes "$nnodes" --node-rank "$node_rank" --rdzv-backend static
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "jobkit.$given_attempt"
    --local-addr "${JOBKIT_NODE_ADDR:-$MASTER_ADDR}" --rdzv-conf "timeout=$(whole_seconds "$start_timeout")")
  unset MASTER_ADDR MASTER_PORT
}
