#!/usr/bin/env bash
#SBATCH --job-name=comm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --output=logs/comm-%j.log
#SBATCH --error=logs/comm-%j.err
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@60
#
# Communication benchmark: latency and bandwidth of the collectives.
#   sbatch hpc/comm.sh                                                          on the CPU (Gloo)
#   sbatch --ntasks-per-node=4 --gpus-per-node=4 hpc/comm.sh --backend nccl     on GPUs
# Options before the file's name are for sbatch, those after it as in run.sh. sbatch runs a copy.
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
[[ -f $root/run.sh ]] || root=${JOBKIT_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
[[ -f $root/run.sh ]] || root=$("${JOBKIT_PYTHON:-python}" -m jobkit --prefix 2>/dev/null)
[[ -f $root/run.sh ]] || { echo "jobkit: error: no run.sh found: submit from jobkit's folder" >&2; exit 2; }
exec bash "$root/run.sh" --comm "$@"
