#!/usr/bin/env bash
# Makes a pool of CPU nodes; two parts of the conversion fit a node.
set -euo pipefail
: "${PROJECT:?set it: Google Cloud project}"
: "${ZONE:?set it: zone of the TPUs, such as us-central1-c}"
: "${CLUSTER:?set it: GKE cluster, in the region of ZONE}"
REGION=${ZONE%-*}
where=(--project="$PROJECT")
gcloud container node-pools describe k3-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" >/dev/null 2>&1 ||
  gcloud container node-pools create k3-pool "${where[@]}" --cluster="$CLUSTER" --location="$REGION" \
    --node-locations="$ZONE" --machine-type=n2-standard-16 --num-nodes=4 --disk-size=100 \
    --workload-metadata=GKE_METADATA --enable-gvnic
