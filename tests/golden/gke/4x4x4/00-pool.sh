#!/usr/bin/env bash
# Makes the node pools: 1 x 4x4x4, each 16 VMs, 64 chips, 128 devices.
set -euo pipefail
[ -n "${PROJECT:-}" ] || { echo 'set PROJECT: Google Cloud project' >&2; exit 2; }
[ -n "${ZONE:-}" ] || { echo 'set ZONE: zone of the TPUs, such as us-central1-c' >&2; exit 2; }
[ -n "${CLUSTER:-}" ] || { echo 'set CLUSTER: GKE cluster, in the region of ZONE' >&2; exit 2; }
REGION=${ZONE%-*}
where=(--project="$PROJECT")
gcloud compute resource-policies describe k3-batch-4x4x4-policy "${where[@]}" --region="$REGION" >/dev/null 2>&1 ||
  gcloud compute resource-policies create workload-policy k3-batch-4x4x4-policy "${where[@]}" --region="$REGION" \
    --type=HIGH_THROUGHPUT --accelerator-topology=4x4x4
gcloud container node-pools describe k3-batch-4x4x4-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" >/dev/null 2>&1 ||
  gcloud container node-pools create k3-batch-4x4x4-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" \
    --node-locations="$ZONE" --machine-type=tpu7x-standard-4t \
    --placement-policy=k3-batch-4x4x4-policy \
    --num-nodes=16 --reservation-affinity=none \
    --workload-metadata=GKE_METADATA --enable-gvnic --host-maintenance-interval=AS_NEEDED \
    --max-pods-per-node=15
