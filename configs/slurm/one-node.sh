#!/usr/bin/env bash
# One node, all its GPUs: sbatch configs/slurm/one-node.sh STUDENT OUT --teacher TEACHER --config FILE
# SLURM sends SIGTERM before the time is up; the step is finished and saved, and the job, put back
# into the queue, goes on from there.
#SBATCH --job-name=bilinearize
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

status=0
srun --kill-on-bad-exit=1 bilinearize finetune "$@" \
	--launch "${SLURM_GPUS_ON_NODE:-8}" --accelerate "${ACCELERATE_CONFIG:-configs/accelerate/ddp.yaml}" || status=$?
if [ "$status" = 143 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
	scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
