#!/usr/bin/env bash
# Makes a pool of CPU nodes; two parts of the conversion fit a node.
set -euo pipefail
[ -n "${PROJECT:-}" ] || { echo 'set PROJECT: Google Cloud project' >&2; exit 2; }
[ -n "${ZONE:-}" ] || { echo 'set ZONE: zone of the TPUs, such as us-central1-c' >&2; exit 2; }
[ -n "${CLUSTER:-}" ] || { echo 'set CLUSTER: GKE cluster, in the region of ZONE' >&2; exit 2; }
REGION=${ZONE%-*}
where=(--project="$PROJECT")
gcloud container node-pools describe k3-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" >/dev/null 2>&1 ||
  gcloud container node-pools create k3-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" \
    --node-locations="$ZONE" --machine-type=n2-standard-16 --num-nodes=4 --disk-size=100 \
    --workload-metadata=GKE_METADATA --enable-gvnic
