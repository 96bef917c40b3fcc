#!/usr/bin/env bash
# All GPUs of one node. Stops with a checkpoint before the time limit of the job; the same command resumes there.
#
#   sbatch scripts/slurm/single_node.sh --data-dir /data/imagenet --output-dir runs/resnet50
#
# Submit it from the repository with the environment active (source .venv/bin/activate): the job inherits both.
#SBATCH --job-name=brisk
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
set -euo pipefail

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it from the job

# srun starts a process per GPU and passes the signal to each of them; torchrun is not needed.
srun --kill-on-bad-exit=1 python train.py "$@"
