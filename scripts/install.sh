#!/usr/bin/env bash
# Installs the locked dependencies and this package into the virtual environment $1, which it makes if need be.
# Takes its packages from wherever the environment's pip and uv are configured to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1
python=$venv/bin/python

if ! [ -e "$python" ] || ! PYTHON=$python scripts/find_python.sh >/dev/null; then
  found=$(scripts/find_python.sh)
  echo "install: $venv from $found" >&2
  "$found" -m venv --clear "$venv"
fi
"$python" -c 'import pip' 2>/dev/null || "$python" -m ensurepip >/dev/null

# uv installs in parallel, which is several times faster. It does not read pip's configuration, so where only that one
# reaches an index, pip does the work and says so. Bytecode is compiled now, as pip does: importing MaxText takes 6 s with it
# and 14 s without, in every process.
uv_pin=$(grep -E '^uv==' requirements/dev.txt)
install() {
  if [ -x "$venv/bin/uv" ] && VIRTUAL_ENV=$venv "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$python" "$@"; then
    return
  fi
  echo "install: uv could not, trying pip" >&2
  "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

"$python" -m pip install --quiet --disable-pip-version-check "$uv_pin"
install --requirement requirements/dev.txt
install --no-deps --no-build-isolation --editable .
# The TPU compiler, which compiles for TPUs without one: beside site-packages, where JAX does not find it unasked
# (docs/decisions/0015-reading-compiled-programs.md). There is none but for Linux on x86-64.
if [ "$(uname -sm)" = "Linux x86_64" ]; then
  install --no-deps --upgrade --target "$venv/tpu-compiler" "$(grep -E '^libtpu==' requirements/plan.txt)"
fi
echo "install: done in $SECONDS s" >&2
