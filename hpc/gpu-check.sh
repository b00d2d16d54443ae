#!/usr/bin/env bash
#SBATCH --job-name=gpu-check
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:45:00
#SBATCH --output=logs/gpu-check-%j.log
#
# Checks what only GPUs can show, and packs the logs into one file to send back.
#   sbatch hpc/gpu-check.sh                    one node; with --nodes=2 also between the nodes
#   bash hpc/gpu-check.sh                      this machine, all of its GPUs
#   bash hpc/gpu-check.sh --device cpu         a rehearsal: no number is of a GPU
# Options: --device cuda|cpu, --folder DIR (default: a new one in logs/), --parts "NAME ..." (of
# comm verify epoch stop recipe; the preflight always comes first).
# Submit it from jobkit's folder: sbatch runs a copy of this file. It prints each number with its
# bound, and MISSED where it is not met. Exit codes: 0 every part passed; 2 wrong usage, or torch
# cannot use the GPUs, with the fix; 4 a part failed.
set -u
umask go-w

fail() { echo "gpu-check: error: $1" >&2; exit 2; }

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
[[ -f $root/run.sh ]] || { root=${JOBKIT_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}; [[ -f $root/run.sh ]]; } || fail "no run.sh found: submit from jobkit's folder"
device=cuda folder='' parts="comm verify epoch stop recipe"
while (($#)); do
  case $1 in
    --device | --folder | --parts) (($# > 1)) || fail "$1 needs a value"; printf -v "${1#--}" %s "$2"; shift 2 ;;
    *) fail "$1 is no option: see the first lines of this file" ;;
  esac
done
[[ $device == cuda || $device == cpu ]] || fail "--device $device: must be cuda or cpu"
folder=${folder:-${JOBKIT_LOGS:-$root/logs}/gpu-check-$(uname -n)-$(date +%Y%m%d-%H%M%S)}
if ! { mkdir -p -- "$folder" && folder=$(CDPATH='' cd -- "$folder" && pwd); }; then fail "$folder cannot be made"; fi

python=${JOBKIT_PYTHON:-python}
if [[ -z ${JOBKIT_PYTHON-} && -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
export JOBKIT_PYTHON=$python JOBKIT_DATA_DIR=$folder/data PYTHONUNBUFFERED=1 PYTORCH_MIOPEN_SUGGEST_NHWC=1
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH NCCL_DEBUG_FILE=$folder/nccl-%h-%p.log
ranks=2 words=(--device "$device")
if [[ $device == cuda ]]; then
  ranks=$("$python" -m jobkit.gpus) || fail "$python cannot start"
  ((ranks)) || fail "no GPU is visible here (see nvidia-smi); --device cpu rehearses the commands"
  nvidia-smi >"$folder/nvidia-smi.txt" 2>&1; nvidia-smi topo -m >"$folder/topology.txt" 2>&1
fi

failed=() first_s=0
# part NAME LIMIT_S COMMAND...: runs it, its output in NAME.log; say NAME REGEX prints of that. The
# limit is that of a machine that starts torch in 5 s, and grows where the first start took longer.
part() {
  local name=$1 limit=$(($2 * (first_s > 5 ? first_s : 5) / 5)) start=$SECONDS code
  shift 2
  timeout --kill-after=15 "$limit" "$@" >"$folder/$name.log" 2>&1 </dev/null
  code=$?
  if ((code == 0)); then
    echo "ok     $name: $((SECONDS - start)) s"
  else
    failed+=("$name")
    echo "FAILED $name: exit code $code after $((SECONDS - start)) s (limit $limit s); the end of its log:"
    tail -n 4 -- "$folder/$name.log" | sed 's/^/         /'
  fi
  return "$code"
}
say() { grep -E "$2" -- "$folder/$1.log" | sed 's/^/         /'; }
one_node=(env)  # without the variables of the allocation
for own in $(compgen -e SLURM_); do one_node+=(-u "$own"); done
torchrun=("${one_node[@]}" "$python" -m torch.distributed.run --standalone "--nproc-per-node=$ranks" -m)
preflight=("${torchrun[@]}" jobkit.checks.preflight.cli)
comm=(bash "$root/run.sh" --comm --nproc-per-node "$ranks")
if [[ -n ${SLURM_JOB_ID-} ]]; then  # between all nodes
  preflight=(bash "$root/run.sh" --preflight --dry-run) comm=(bash "$root/run.sh" --comm)
fi
if [[ $device == cuda ]]; then
  comm+=(--backend nccl --max-bytes 256M)
  verify=(--model jobkit.checks.verify.cases:layers --strategies ddp fsdp pp mp --device cuda --world-sizes $((ranks < 8 ? ranks : 8)))
  training=(--model resnet18 --train-samples 20000 --epochs 2 --precision bf16)
  recipe=(--recipe fast)
else
  comm+=(--backend gloo --max-bytes 16K --ops all_reduce)
  verify=(--strategies ddp --world-sizes 2)
  training=(--model mlp --train-samples 4096 --test-samples 16 --global-batch-size 32 --epochs 2)
  recipe=(--recipe fast-cpu --max-steps 3 --train-samples 64 --test-samples 16 --global-batch-size 32)
fi
run=(bash "$root/run.sh" --nproc-per-node "$ranks" "${words[@]}" --dataset synthetic --why 0)
# A run that is stopped after iteration 6 and saves a checkpoint, then the same command again.
stop=("${run[@]}" "${training[@]}" --run-dir "$folder/stop")
# shellcheck disable=SC2016  # the words are of the shell that it starts
stopped() { part stop 180 "${one_node[@]}" bash -c 'JOBKIT_FAULT=usr2@6 "$@"; code=$?
  ((code == 75)) || { echo "after USR2: exit code $code, and not 75"; exit 4; }; "$@"' stop "${stop[@]}"; }

pack() {
  tar -czf "$folder.tar.gz" -C "$(dirname -- "$folder")" --exclude='checkpoints' --exclude='data' \
    --exclude='*.sh' --exclude='*.pkl' --exclude='*.pt' -- "$(basename -- "$folder")"
  echo "send back: $folder.tar.gz"
}
trap pack EXIT
part preflight 180 "${preflight[@]}" "${words[@]}" --dataset synthetic
first_s=$SECONDS
((ranks * ${SLURM_NNODES:-1} > 1)) || { parts=${parts/comm/}; echo "no comm: it needs two ranks"; }
say preflight '^.preflight. (note|FAULT|ok (environment|cores|bandwidth|transports))'
{ grep -q 'ok environment' "$folder/preflight.log" && ! grep -qE 'FAULT (gpus|versions)' "$folder/preflight.log"; } ||
  { echo "nothing else can run until this is fixed (if torch is missing: make venv, or set JOBKIT_PYTHON)"; exit 2; }
for each in $parts; do
  case $each in
    comm) part comm 180 "${comm[@]}" --run-dir "$folder/comm"; say comm '^all_reduce|WRONG' | tail -n 3 ;;
    verify) part verify 180 "${one_node[@]}" "$python" -m jobkit verify "${verify[@]}"; say verify 'tolerance|OVER|ok$|all are' ;;
    epoch) part epoch 150 "${torchrun[@]}" jobkit.checks.gpu "${words[@]}"; say epoch '^(ok|MISSED)' ;;
    stop) stopped; say stop '^after USR2' ;;
    recipe)
      part recipe 300 "${one_node[@]}" "${run[@]}" "${recipe[@]}" --run-dir "$folder/recipe"
      say recipe '^done'
      joules=$(cat "$folder"/recipe/metrics/*.jsonl | grep -oE '"energy_gpu_j":[0-9.]+' | tail -n 1)
      echo "         ${joules:-MISSED energy: no GPU has a counter}"; [[ -n $joules || $device == cpu ]] || failed+=(energy) ;;
    *) echo "no part '$each'"; failed+=("$each") ;;
  esac
done
echo "${#failed[@]} failed${failed[*]:+: ${failed[*]}}"
((${#failed[@]} == 0)) || exit 4
