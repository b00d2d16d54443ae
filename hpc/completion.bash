# Completion of options and values for bash and zsh, made from the parsers by `make docs`.
#
#   source hpc/completion.bash                                        bash
#   autoload -U bashcompinit && bashcompinit; source hpc/completion.bash      zsh (after compinit)
#
# It starts no program. What another completion serves already (sbatch's) is left to it.

# The options of a command.
_jobkit_options() {
  case $1 in
    'run.sh') echo '--comm --help-training --launcher --master-addr --master-port --max-restarts --monitor-interval --nnodes --no-auto --node-rank --nodes --nproc-per-node --ntasks-per-node --preflight --run-dir --shutdown-timeout --site --start-timeout --unit --warmup-steps --work-per-step --help --run-dir --attempt --spec --dry-run --check --resume-from --fresh --recipe --repeat --strategy --epochs --max-steps --seed --device --threads --timeout-s --keep-memory --no-keep-memory --model --hidden --width --precision --fp32 --cudnn-benchmark --no-cudnn-benchmark --deterministic --no-deterministic --channels-last --no-channels-last --compile --no-compile --compile-mode --activation-checkpointing --no-activation-checkpointing --dataset --data-dir --train-samples --test-samples --train-split --augment --no-augment --flip --crop-padding --tta --global-batch-size --batch-size-per-rank --accumulate --eval-batch-size --optimizer --lr --momentum --nesterov --no-nesterov --weight-decay --lr-schedule --lr-warmup-epochs --lr-scaling --lr-base-batch-size --bias-lr-factor --label-smoothing --lookahead-every --clip-norm --ddp-bucket-mib --ddp-gradient-as-bucket-view --no-ddp-gradient-as-bucket-view --ddp-static-graph --no-ddp-static-graph --ddp-find-unused-parameters --no-ddp-find-unused-parameters --ddp-comm-hook --ddp-powersgd-rank --ddp-powersgd-start --sync-batchnorm --no-sync-batchnorm --zero1 --no-zero1 --fsdp-wrap --fsdp-wrap-min-parameters --fsdp-group-mib --fsdp-reshard-after-forward --no-fsdp-reshard-after-forward --fsdp-reduce-fp32 --no-fsdp-reduce-fp32 --fsdp-cpu-offload --no-fsdp-cpu-offload --fsdp-hybrid-replicas --fsdp-prefetch --pipeline-stages --pipeline-schedule --pipeline-split --microbatches --checkpoint-every --checkpoint-keep --checkpoint-async --no-checkpoint-async --stop-signal --warmup-iterations --breakdown-iterations --check-ranks --profile --profile-ranks' ;;
    'prepare') echo '--help --dataset --data-dir' ;;
    'run') echo '--help --version --study --name --strategies --gpus --gpus-per-node --repeats --launcher --unit --work-per-step --pattern --no-auto --sweep --parameter --site --max-running --only --max-restarts --dry-run --no-wait --monitor-interval --start-timeout --sbatch --partition --account --qos --time --constraint --reservation --nodelist --exclude --mem --gres --gpus-per-task --cpus-per-task --begin --comment --dependency --mail-type --mail-user --gpu-request --exclusive --within-allocation --max-node-hours --no-collect --to --image --kind --queue --volume-claim --gpu-resource --pod-cpus --pod-memory --shm-size --grace-s --user-id --recipe --epochs --max-steps --seed --device --threads --timeout-s --keep-memory --no-keep-memory --model --hidden --width --precision --fp32 --cudnn-benchmark --no-cudnn-benchmark --deterministic --no-deterministic --channels-last --no-channels-last --compile --no-compile --compile-mode --activation-checkpointing --no-activation-checkpointing --dataset --data-dir --train-samples --test-samples --train-split --augment --no-augment --flip --crop-padding --tta --global-batch-size --batch-size-per-rank --accumulate --eval-batch-size --optimizer --lr --momentum --nesterov --no-nesterov --weight-decay --lr-schedule --lr-warmup-epochs --lr-scaling --lr-base-batch-size --bias-lr-factor --label-smoothing --lookahead-every --clip-norm --ddp-bucket-mib --ddp-gradient-as-bucket-view --no-ddp-gradient-as-bucket-view --ddp-static-graph --no-ddp-static-graph --ddp-find-unused-parameters --no-ddp-find-unused-parameters --ddp-comm-hook --ddp-powersgd-rank --ddp-powersgd-start --sync-batchnorm --no-sync-batchnorm --zero1 --no-zero1 --fsdp-wrap --fsdp-wrap-min-parameters --fsdp-group-mib --fsdp-reshard-after-forward --no-fsdp-reshard-after-forward --fsdp-reduce-fp32 --no-fsdp-reduce-fp32 --fsdp-cpu-offload --no-fsdp-cpu-offload --fsdp-hybrid-replicas --fsdp-prefetch --pipeline-stages --pipeline-schedule --pipeline-split --microbatches --checkpoint-every --checkpoint-keep --checkpoint-async --no-checkpoint-async --stop-signal --warmup-iterations --breakdown-iterations --check-ranks --profile --profile-ranks' ;;
    'launch') echo '--help --nproc-per-node --nnodes --node-rank --master-addr --master-port --launcher --run-dir --max-restarts --monitor-interval --start-timeout --shutdown-timeout' ;;
    'status') echo '--help --watch --json --interval' ;;
    'cancel') echo '--help' ;;
    'drill') echo '--help --minicluster --local --faults --list --at --after --patience --name --site --account --partition --urgent-partition --device' ;;
    'rehearse') echo '--help --nodes --ranks-per-node --steps --keep' ;;
    'check-edf') echo '--help --json --no-paths' ;;
    'check-k8s') echo '--help --json' ;;
    'verify') echo '--help --strategies --world-sizes --model --device --global-batch-size --classes --optimizer --lr --json' ;;
    'memory') echo '--help --gpus --nodes --json --csv --parameters --classes --images --strategy --keep-memory --no-keep-memory --model --hidden --width --precision --fp32 --cudnn-benchmark --no-cudnn-benchmark --deterministic --no-deterministic --channels-last --no-channels-last --compile --no-compile --compile-mode --activation-checkpointing --no-activation-checkpointing --crop-padding --global-batch-size --batch-size-per-rank --accumulate --optimizer --lr --momentum --nesterov --no-nesterov --weight-decay --lr-schedule --lr-warmup-epochs --lr-scaling --lr-base-batch-size --lookahead-every --clip-norm --ddp-bucket-mib --ddp-gradient-as-bucket-view --no-ddp-gradient-as-bucket-view --ddp-static-graph --no-ddp-static-graph --ddp-find-unused-parameters --no-ddp-find-unused-parameters --ddp-comm-hook --ddp-powersgd-rank --ddp-powersgd-start --sync-batchnorm --no-sync-batchnorm --zero1 --no-zero1 --fsdp-wrap --fsdp-wrap-min-parameters --fsdp-group-mib --fsdp-reshard-after-forward --no-fsdp-reshard-after-forward --fsdp-reduce-fp32 --no-fsdp-reduce-fp32 --fsdp-cpu-offload --no-fsdp-cpu-offload --fsdp-hybrid-replicas --fsdp-prefetch --pipeline-stages --pipeline-schedule --pipeline-split --microbatches --checkpoint-every --checkpoint-keep --checkpoint-async --no-checkpoint-async --stop-signal --breakdown-iterations --profile --profile-ranks' ;;
    'advise') echo '--help --device-memory --nodes --gpus-per-node --network-gb-per-s --link-gb-per-s --reserve --json --parameters --classes --images --keep-memory --no-keep-memory --model --hidden --width --precision --fp32 --cudnn-benchmark --no-cudnn-benchmark --deterministic --no-deterministic --channels-last --no-channels-last --compile --no-compile --compile-mode --activation-checkpointing --no-activation-checkpointing --crop-padding --global-batch-size --batch-size-per-rank --accumulate --optimizer --lr --momentum --nesterov --no-nesterov --weight-decay --lr-schedule --lr-warmup-epochs --lr-scaling --lr-base-batch-size --lookahead-every --clip-norm --ddp-bucket-mib --ddp-gradient-as-bucket-view --no-ddp-gradient-as-bucket-view --ddp-static-graph --no-ddp-static-graph --ddp-find-unused-parameters --no-ddp-find-unused-parameters --ddp-comm-hook --ddp-powersgd-rank --ddp-powersgd-start --sync-batchnorm --no-sync-batchnorm --fsdp-wrap --fsdp-wrap-min-parameters --fsdp-group-mib --fsdp-reduce-fp32 --no-fsdp-reduce-fp32 --fsdp-cpu-offload --no-fsdp-cpu-offload --fsdp-prefetch --pipeline-stages --pipeline-schedule --pipeline-split --microbatches --checkpoint-every --checkpoint-keep --checkpoint-async --no-checkpoint-async --stop-signal --breakdown-iterations --profile --profile-ranks' ;;
    'preflight') echo '--help --run-dir --dataset --data-dir --device --timeout --json' ;;
    'comm') echo '--help --ops --backend --min-bytes --max-bytes --factor --iterations --warmup --seconds-per-size --timeout --nproc-per-node --run-dir --attempt --check' ;;
    'plot-comm') echo '--help' ;;
    'step-model') echo '--help --comm' ;;
    'collect') echo '--help --json --apart --accuracy --min-efficiency --at --logs --pattern --size --gpus-per-node --name --unit --work-per-step --warmup-steps' ;;
    'try-pattern') echo '--help --pattern --line --of --spans --ranks --most' ;;
    'check-claims') echo '--help --samples --epochs --weak' ;;
    'compare') echo '--help --reference --tolerance' ;;
    'plot') echo '--help --forecast --ranks-per-node --min-efficiency --step-model' ;;
    'export') echo '--help --to --out --max-batch --march --jacobian --model' ;;
    'exercise') echo '--help --skeleton --check' ;;
    'meter') echo '--help' ;;
    'minicluster') echo '--help' ;;
    'minicluster up') echo '--help --dir --nodes --cores --gpus --memory --port --no-accounting --preemption --netns --memory-limits --enforce --energy' ;;
    'minicluster status') echo '--help --dir' ;;
    'minicluster env') echo '--help --dir' ;;
    'minicluster down') echo '--help --dir --keep-logs' ;;
    'minicluster link') echo '--help --dir' ;;
    'minicluster kill') echo '--help --dir --jobs' ;;
    'minicluster start') echo '--help --dir' ;;
    'minicluster install') echo '--help' ;;
  esac
}

# The values of an option that takes one of a few, or the commands of a program.
_jobkit_values() {
  case $1 in
    'jobkit') echo 'prepare run launch status cancel drill rehearse check-edf check-k8s verify memory advise preflight comm plot-comm step-model collect try-pattern check-claims compare plot export exercise meter' ;;
    'run.sh --recipe') echo 'fast fast-cpu' ;;
    'run.sh --strategy') echo 'single dp ddp fsdp mp pp' ;;
    'run.sh --device') echo 'auto cpu cuda' ;;
    'run.sh --model') echo 'cnn fast_cnn resnet18 mlp' ;;
    'run.sh --precision') echo 'auto fp32 bf16 fp16' ;;
    'run.sh --fp32') echo 'auto ieee tf32' ;;
    'run.sh --dataset') echo 'cifar10 synthetic' ;;
    'run.sh --flip') echo 'random alternating' ;;
    'run.sh --tta') echo 'none flip flip_shift' ;;
    'run.sh --optimizer') echo 'sgd adam adamw' ;;
    'run.sh --lr-schedule') echo 'onecycle triangular cosine constant' ;;
    'run.sh --lr-scaling') echo 'none linear sqrt' ;;
    'run.sh --ddp-comm-hook') echo 'none fp16 bf16 powersgd' ;;
    'run.sh --pipeline-schedule') echo 'gpipe 1f1b interleaved' ;;
    'run.sh --stop-signal') echo 'USR1 USR2' ;;
    'prepare --dataset') echo 'cifar10 synthetic' ;;
    'run --strategies') echo 'single dp ddp fsdp mp pp' ;;
    'run --strategies ...') echo 'single dp ddp fsdp mp pp' ;;
    'run --launcher') echo 'srun torchrun once' ;;
    'run --only') echo 'missing failed oom timeout preempted cancelled node_fail' ;;
    'run --gpu-request') echo 'gpus-per-node gres gpus-per-task none' ;;
    'run --to') echo 'kubernetes' ;;
    'run --kind') echo 'job jobset trainjob' ;;
    'run --recipe') echo 'fast fast-cpu' ;;
    'run --device') echo 'auto cpu cuda' ;;
    'run --model') echo 'cnn fast_cnn resnet18 mlp' ;;
    'run --precision') echo 'auto fp32 bf16 fp16' ;;
    'run --fp32') echo 'auto ieee tf32' ;;
    'run --dataset') echo 'cifar10 synthetic' ;;
    'run --flip') echo 'random alternating' ;;
    'run --tta') echo 'none flip flip_shift' ;;
    'run --optimizer') echo 'sgd adam adamw' ;;
    'run --lr-schedule') echo 'onecycle triangular cosine constant' ;;
    'run --lr-scaling') echo 'none linear sqrt' ;;
    'run --ddp-comm-hook') echo 'none fp16 bf16 powersgd' ;;
    'run --pipeline-schedule') echo 'gpipe 1f1b interleaved' ;;
    'run --stop-signal') echo 'USR1 USR2' ;;
    'drill --device') echo 'cpu cuda' ;;
    'verify --strategies') echo 'single dp ddp fsdp mp pp' ;;
    'verify --strategies ...') echo 'single dp ddp fsdp mp pp' ;;
    'verify --model') echo 'cnn fast_cnn resnet18 mlp' ;;
    'verify --device') echo 'auto cpu cuda' ;;
    'verify --optimizer') echo 'sgd adam adamw' ;;
    'memory --strategy') echo 'single dp ddp fsdp mp pp' ;;
    'memory --model') echo 'cnn fast_cnn resnet18 mlp' ;;
    'memory --precision') echo 'auto fp32 bf16 fp16' ;;
    'memory --fp32') echo 'auto ieee tf32' ;;
    'memory --optimizer') echo 'sgd adam adamw' ;;
    'memory --lr-schedule') echo 'onecycle triangular cosine constant' ;;
    'memory --lr-scaling') echo 'none linear sqrt' ;;
    'memory --ddp-comm-hook') echo 'none fp16 bf16 powersgd' ;;
    'memory --pipeline-schedule') echo 'gpipe 1f1b interleaved' ;;
    'memory --stop-signal') echo 'USR1 USR2' ;;
    'advise --model') echo 'cnn fast_cnn resnet18 mlp' ;;
    'advise --precision') echo 'auto fp32 bf16 fp16' ;;
    'advise --fp32') echo 'auto ieee tf32' ;;
    'advise --optimizer') echo 'sgd adam adamw' ;;
    'advise --lr-schedule') echo 'onecycle triangular cosine constant' ;;
    'advise --lr-scaling') echo 'none linear sqrt' ;;
    'advise --ddp-comm-hook') echo 'none fp16 bf16 powersgd' ;;
    'advise --pipeline-schedule') echo 'gpipe 1f1b interleaved' ;;
    'advise --stop-signal') echo 'USR1 USR2' ;;
    'preflight --dataset') echo 'cifar10 synthetic' ;;
    'comm --backend') echo 'auto gloo nccl' ;;
    'export --to') echo 'aoti onnx state_dict' ;;
    'export --march') echo 'x86-64-v2 x86-64-v3 x86-64-v4 native' ;;
    'export --model') echo 'cnn fast_cnn resnet18 mlp' ;;
    'minicluster') echo 'up status env down link kill start install' ;;
  esac
}

# The command that a line calls, from the words before the one that is completed.
_jobkit_command() {
  local command='' word
  for word in "$@"; do
    case ${word##*/} in
      run.sh) command=run.sh ;;
      comm.sh) command='comm' ;;
      run_benchmarks.py) command=run ;;
      collect_results.py) command=collect ;;
      plot_results.py | plot_results.sh) command=plot ;;
      jobkit | minicluster) command=${word##*/} ;;
      [a-z]*) [[ $command != jobkit && $command != minicluster ]] || command="$command $word" ;;
    esac
  done
  echo "${command#jobkit }"
}

# The names of what there is: of studies that were planned, or of files in a folder.
_jobkit_names() {
  local path
  for path in "$1"/*"$2"; do
    [[ ! -e $path ]] || { path=${path%"$2"}; echo "${path##*/}"; }
  done
}

# What may stand where the cursor is. $1: the command; $2: the word there; $3: the word before;
# $4: the last option before.
_jobkit_words() {
  case $3 in
    --study) _jobkit_names hpc/studies .toml; return ;;
    --site) _jobkit_names hpc/sites .toml; return ;;
  esac
  case $2,$3 in
    -*) _jobkit_options "$1" ;;
    *,-*) _jobkit_values "$1 $3" ;;
    *)
      _jobkit_values "$1 $4 ..." # an option of several values
      _jobkit_values "$1"
      case $1 in
        status | cancel | collect | plot | step-model)
          _jobkit_names "${JOBKIT_LOGS:-logs}" /plan.json ;;
      esac ;;
  esac
}

_jobkit() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} last='' each command
  [[ $word != = ]] || word=''
  [[ $before != = ]] || before=${COMP_WORDS[COMP_CWORD - 2]} # --option=value
  for each in "${COMP_WORDS[@]:0:$COMP_CWORD}"; do
    [[ $each != -* ]] || last=$each
  done
  command=$(_jobkit_command "${COMP_WORDS[@]:0:$COMP_CWORD}")
  COMPREPLY=()
  # shellcheck disable=SC2207 # every word is a plain one
  [[ -z $command ]] ||
    COMPREPLY=($(compgen -W "$(_jobkit_words "$command" "$word" "$before" "$last")" -- "$word"))
}

# Files are offered where there is nothing else.
complete -o bashdefault -o default -F _jobkit jobkit run.sh run_benchmarks.py collect_results.py \
  plot_results.py plot_results.sh minicluster
for _jobkit_program in python python3 bash sbatch; do
  [[ -z ${ZSH_VERSION-} ]] || break # it has its own for them
  ! declare -F _completion_loader >/dev/null || _completion_loader "$_jobkit_program" || :
  complete -p "$_jobkit_program" >/dev/null 2>&1 ||
    complete -o bashdefault -o default -F _jobkit "$_jobkit_program"
done
unset _jobkit_program
