#!/usr/bin/env bash
# All GPUs of several nodes; --output-dir and --data-dir must mean the same folders on all of them.
#
#   sbatch --nodes=4 scripts/slurm/multi_node.sh --data-dir /data/imagenet --output-dir runs/resnet50
#
# Submit it from the repository with the environment active (source .venv/bin/activate): the job inherits both.
#SBATCH --job-name=brisk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
set -euo pipefail

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it from the job

# The rendezvous is on the first node, at a port that follows from the numbers of job and step.
srun --kill-on-bad-exit=1 python train.py "$@"
