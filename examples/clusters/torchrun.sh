#!/bin/sh
# torchrun on several hosts: start the same command on each. Arguments go to train.py.
#
#   HEAD=host1 HOSTS=2 RANKS=8 examples/clusters/torchrun.sh --out /shared/run
#
# HEAD is one of the hosts, by a name or address at which all reach it: not localhost.
# RANKS is for each host. Two jobs with the same HEAD need two values of PORT, as
# PORT=29501: else the second one joins the first, or cannot listen.
exec torchrun --nnodes="${HOSTS:?}" --nproc-per-node="${RANKS:?}" \
  --rdzv-id="${JOB:-fshard-${PORT:-29500}}" --rdzv-backend=c10d \
  --rdzv-endpoint="${HEAD:?}:${PORT:-29500}" \
  "$(dirname "$0")/train.py" "$@"
