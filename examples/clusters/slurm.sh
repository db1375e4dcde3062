#!/bin/bash
#SBATCH --job-name=fshard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
# Slurm starts torchrun on each host, and torchrun a process for each GPU. In a clone
# that all hosts see:
#
#   OUT=/shared/run sbatch examples/clusters/slurm.sh
set -euo pipefail

# The first host of the job. SLURM_LAUNCH_NODE_IPADDR is the host where srun was called:
# under salloc the login host. `head` would end scontrol early: an error here.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# srun does not take --cpus-per-task over from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
ulimit -n "$(ulimit -Hn)"

srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29500" \
  examples/clusters/train.py --out "$OUT" "$@"
