#!/usr/bin/env bash
# Several nodes: sbatch --nodes=4 configs/slurm/many-nodes.sh STUDENT OUT --teacher TEACHER --config FILE
# OUT and everything named has to lie on a file system that all nodes see.
#SBATCH --job-name=bilinearize
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:-8}
export MAIN_ADDRESS=$first MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))
export GPUS=$gpus CONFIG=${ACCELERATE_CONFIG:-configs/accelerate/fsdp2.yaml}
status=0
# Each node starts its own processes; SLURM_PROCID is the node's rank.
srun --kill-on-bad-exit=1 bash -c 'accelerate launch --config_file "$CONFIG" \
	--num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * GPUS)) \
	--machine_rank "$SLURM_PROCID" --main_process_ip "$MAIN_ADDRESS" --main_process_port "$MAIN_PORT" \
	--rdzv_backend c10d -m bilinearize finetune "$@"' finetune "$@" || status=$?
if [ "$status" = 143 ]; then
	scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
