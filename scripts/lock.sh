#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/base.txt, dev.txt and plan.txt with the uv given as $1; further arguments are
# uv's, such as --upgrade. One file serves Python 3.12 and 3.13 on every platform; plan.txt is the TPU compiler alone, for
# the one platform that has it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=$1
shift
compile() {
  "$uv" pip compile --quiet --universal --python-version 3.12 --no-emit-index-url --no-emit-find-links \
    --custom-compile-command 'make lock' pyproject.toml "$@"
}
compile --output-file requirements/base.txt "$@"
compile --extra dev --constraint requirements/base.txt --output-file requirements/dev.txt "$@"
compile --extra plan --constraint requirements/base.txt --output-file requirements/plan.txt "$@"
for version in 3.12 3.13; do
  "$uv" pip compile --quiet --python-version "$version" requirements/dev.txt >/dev/null
done
