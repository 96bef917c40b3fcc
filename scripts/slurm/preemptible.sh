#!/usr/bin/env bash
# A job that may be preempted at any time: it saves, requeues itself, and resumes from its checkpoint.
#
#   sbatch scripts/slurm/preemptible.sh --data-dir /data/imagenet --output-dir runs/resnet50
#
# Submit it from the repository with the environment active (source .venv/bin/activate): the job inherits both.
#SBATCH --job-name=brisk
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it from the job

# Slurm sends SIGTERM to this script too when it preempts the job. srun's processes handle it, not the script.
trap '' TERM
status=0
srun --kill-on-bad-exit=1 python train.py "$@" || status=$?
if [[ $status -eq 143 || $status -eq 138 ]]; then # stopped, with a checkpoint; or by USR1 before the handler was set
    scontrol requeue Incomplete "$SLURM_JOB_ID" # a job that was canceled is complete to Slurm, and stays canceled
fi
exit "$status"
