#!/usr/bin/env bash
# Lets the job's service account use the bucket.
set -euo pipefail
[ -n "${PROJECT:-}" ] || { echo 'set PROJECT: Google Cloud project' >&2; exit 2; }
[ -n "${BUCKET:-}" ] || { echo 'set BUCKET: bucket without gs://' >&2; exit 2; }
case $BUCKET in */*) echo "BUCKET is $BUCKET: give the name alone, without gs://" >&2; exit 2 ;; esac
number=$(gcloud projects describe "$PROJECT" --format="value(projectNumber)")
gcloud storage buckets add-iam-policy-binding "gs://$BUCKET" --role=roles/storage.objectUser \
  --member="principal://iam.googleapis.com/projects/$number/locations/global/workloadIdentityPools/$PROJECT.svc.id.goog/subject/ns/default/sa/k3-batch-4x4x4"
