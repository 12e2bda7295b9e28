#!/usr/bin/env bash
# Makes the node pools: 1 x 2x2x1, each 1 VM, 4 chips, 8 devices.
set -euo pipefail
[ -n "${PROJECT:-}" ] || { echo 'set PROJECT: Google Cloud project' >&2; exit 2; }
[ -n "${ZONE:-}" ] || { echo 'set ZONE: zone of the TPUs, such as us-central1-c' >&2; exit 2; }
[ -n "${CLUSTER:-}" ] || { echo 'set CLUSTER: GKE cluster, in the region of ZONE' >&2; exit 2; }
REGION=${ZONE%-*}
where=(--project="$PROJECT")
gcloud container node-pools describe k3-batch-2x2x1-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" >/dev/null 2>&1 ||
  gcloud container node-pools create k3-batch-2x2x1-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" \
    --node-locations="$ZONE" --machine-type=tpu7x-standard-4t \
    --num-nodes=1 --reservation-affinity=none \
    --workload-metadata=GKE_METADATA --enable-gvnic --host-maintenance-interval=AS_NEEDED \
    --max-pods-per-node=15
