#!/usr/bin/env bash
# Applies the manifests and waits. Exit code 0: done; 1: failed; 2: refused.
set -euo pipefail
[ -n "${BUCKET:-}" ] || { echo 'set BUCKET: bucket without gs://' >&2; exit 2; }
case $BUCKET in */*) echo "BUCKET is $BUCKET: give the name alone, without gs://" >&2; exit 2 ;; esac
[ -n "${IMAGE:-}" ] || { echo 'set IMAGE: image with a tag, such as us-docker.pkg.dev/PROJECT/REPOSITORY/kimi-k3:0.1.0' >&2; exit 2; }
case ${IMAGE##*/} in
  *:latest) echo "IMAGE is $IMAGE: give a tag that will always mean this image" >&2; exit 2 ;;
  *:* | *@sha256:*) ;;
  *) echo "IMAGE is $IMAGE: a tag is missing" >&2; exit 2 ;;
esac
export BUCKET IMAGE
cd "$(dirname "${BASH_SOURCE[0]}")"
namespace=default
jsonpath='{.status.conditions[?(@.status=="True")].type}'
conditions() { kubectl get "$@" --namespace="$namespace" -o "jsonpath=$jsonpath"; }
refuse_ended() {  # KIND/NAME; one that runs is waited for
  case " $(conditions "$1" --ignore-not-found) " in
    *" Complete "* | *" Completed "* | *" Failed "*)
      echo "$1 has ended before, and applying it again runs nothing: kubectl delete $1, then start this again" >&2
      exit 2 ;;
  esac
}
wait_for() {  # KIND/NAME; ends with 1 when it has failed, or is not there any more
  local found
  while true; do
    if found=$(kubectl get "$1" --namespace="$namespace" --ignore-not-found -o name) && [ -z "$found" ]; then
      echo "$1: gone: deleted, or its time after the end is over; what it wrote is in gs://$BUCKET" >&2
      exit 1
    fi
    case " $(conditions "$1" --ignore-not-found || true) " in  # the API server may be away for a while
      *" Complete "* | *" Completed "*) echo "$1: done"; return ;;
      *" Failed "*) echo "$1: failed: kubectl describe $1" >&2; exit 1 ;;
    esac
    sleep 30
  done
}
apply() { envsubst '${BUCKET} ${IMAGE}' <"$1" | kubectl apply --namespace="$namespace" -f -; }
apply 10-storage.yaml
apply 11-config.yaml
refuse_ended job/k3-batch-2x2x1
apply 20-job.yaml
wait_for job/k3-batch-2x2x1
gcloud storage cat "gs://$BUCKET/runs/k3-batch-2x2x1/summary.json"
