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
#
# One node, four GPUs, a process each (NCCL). More nodes: sbatch --nodes=2 hpc/train_distributed_gpu.sh
#   sbatch hpc/train_distributed_gpu.sh --epochs 2 --dataset synthetic
# Options before the file's name are for sbatch, those after it as in run.sh. sbatch runs a copy.
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
[[ -f $root/run.sh ]] || root=${JOBKIT_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
[[ -f $root/run.sh ]] || root=$("${JOBKIT_PYTHON:-python}" -m jobkit --prefix 2>/dev/null)
[[ -f $root/run.sh ]] || { echo "jobkit: error: no run.sh found: submit from jobkit's folder" >&2; exit 2; }
exec bash "$root/run.sh" "$@"
