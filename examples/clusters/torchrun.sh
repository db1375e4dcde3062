#!/bin/sh
# torchrun on several hosts: start the same command on each of them. Arguments go to train.py.
#
#   HEAD=host1 HOSTS=2 RANKS=8 examples/clusters/torchrun.sh --out /shared/run
#
# HEAD is one of the hosts, by a name or address at which all of them reach it: not localhost. RANKS is for each host.
exec torchrun --nnodes="${HOSTS:?}" --nproc-per-node="${RANKS:?}" \
  --rdzv-id=fshard --rdzv-backend=c10d --rdzv-endpoint="${HEAD:?}:29500" \
  "$(dirname "$0")/train.py" "$@"
