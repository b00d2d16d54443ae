#!/bin/bash

# Parameters
#SBATCH --array=0-3%3
#SBATCH --gpus-per-node=2
#SBATCH --job-name=golden-n1-g2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/logs/golden/.submitit/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --time=00:10:00

# command
export SUBMITIT_EXECUTOR=slurm
exec /venv/bin/python -u -m submitit.core._submit /logs/golden/.submitit


#!/bin/bash

# Parameters
#SBATCH --array=0-3%3
#SBATCH --gpus-per-node=4
#SBATCH --job-name=golden-n2-g4
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/logs/golden/.submitit/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --time=00:10:00

# command
export SUBMITIT_EXECUTOR=slurm
exec /venv/bin/python -u -m submitit.core._submit /logs/golden/.submitit
