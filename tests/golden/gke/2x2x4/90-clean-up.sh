#!/usr/bin/env bash
# Deletes the job and its node pools. Bucket, results and image stay.
set -euo pipefail
[ -n "${PROJECT:-}" ] || { echo 'set PROJECT: Google Cloud project' >&2; exit 2; }
[ -n "${ZONE:-}" ] || { echo 'set ZONE: zone of the TPUs, such as us-central1-c' >&2; exit 2; }
[ -n "${CLUSTER:-}" ] || { echo 'set CLUSTER: GKE cluster, in the region of ZONE' >&2; exit 2; }
REGION=${ZONE%-*}
export BUCKET=deleted IMAGE=deleted:0
cd "$(dirname "${BASH_SOURCE[0]}")"
left=0
envsubst '${BUCKET} ${IMAGE}' <20-jobset.yaml | kubectl delete --namespace=default --ignore-not-found -f - || left=1
envsubst '${BUCKET} ${IMAGE}' <11-config.yaml | kubectl delete --namespace=default --ignore-not-found -f - || left=1
envsubst '${BUCKET} ${IMAGE}' <10-storage.yaml | kubectl delete --namespace=default --ignore-not-found -f - || left=1
gcloud container node-pools delete k3-batch-2x2x4-pool --quiet --project="$PROJECT" --cluster="$CLUSTER" --location="$REGION" || left=1
gcloud compute resource-policies delete k3-batch-2x2x4-policy --quiet --project="$PROJECT" --region="$REGION" || left=1
if [ "$left" = 1 ]; then
  echo "not all was there or could be deleted: see above" >&2
  exit 1
fi
