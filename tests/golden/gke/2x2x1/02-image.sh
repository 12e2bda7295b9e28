#!/usr/bin/env bash
# Builds the image from the last commit and pushes it. Run it in the checkout.
set -euo pipefail
[ -n "${IMAGE:-}" ] || { echo 'set IMAGE: image with a tag, such as us-docker.pkg.dev/PROJECT/REPOSITORY/kimi-k3:0.1.0' >&2; exit 2; }
case ${IMAGE##*/} in
  *:latest) echo "IMAGE is $IMAGE: give a tag that will always mean this image" >&2; exit 2 ;;
  *:* | *@sha256:*) ;;
  *) echo "IMAGE is $IMAGE: a tag is missing" >&2; exit 2 ;;
esac
cd "$(git rev-parse --show-toplevel)"
if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
  echo "the working tree has changes, and the image would be without them: commit them" >&2
  exit 2
fi
git archive HEAD |
  docker build --platform=linux/amd64 --file=scripts/gke/Dockerfile \
    --build-arg=COMMIT="$(git rev-parse HEAD)" --tag="$IMAGE" -
docker push "$IMAGE"
