#!/bin/sh
# Slurm's HealthCheckProgram: it drains the node when its network failed a check, with what was measured as the reason, and resumes
# it when a later check has passed. A node that has another reason stays as it is. Without an answer, nothing changes.
export PATH=/usr/local/bin:/usr/bin:/bin
export KUBECONFIG=/etc/evenkeel/kubeconfig
node=$SLURMD_NODENAME # the node's name in Kubernetes

answer=$(kubectl-evenkeel check node "$node")
status=$?
[ "$status" -le 1 ] || exit 0
# A node that slurmd calls healthy has nothing to be resumed from. This spares the controller a request from each node.
[ "$status$SLURM_NODE_IS_HEALTHY" = 0yes ] && exit 0

reason=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/^ *Reason=//p')
case "$status:$reason" in
1:) exec scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason="evenkeel: $answer" ;;
0:evenkeel:*) exec scontrol update NodeName="$SLURMD_NODENAME" State=RESUME ;;
esac
