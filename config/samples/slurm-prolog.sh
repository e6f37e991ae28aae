#!/bin/sh
# Slurm's Prolog: a node whose network failed a check takes no job. Every exit status but 0 drains the node and holds the job, so only
# a failed check gives one. Without an answer, the job starts.
export PATH=/usr/local/bin:/usr/bin:/bin
export KUBECONFIG=/etc/evenkeel/kubeconfig
node=$SLURMD_NODENAME # the node's name in Kubernetes

answer=$(kubectl-evenkeel check node "$node")
if [ $? -eq 1 ]; then
  logger -t evenkeel "$answer"
  exit 1
fi
exit 0
