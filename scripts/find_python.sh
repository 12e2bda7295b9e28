#!/usr/bin/env bash
# Prints the path of a Python 3.12 or 3.13 that can make virtual environments; without one, a line on stderr and exit 2.
# Takes $PYTHON if set; else tries PATH, then pyenv, then what uv already has. Installs nothing.
set -u

fits() { # A pyenv shim exists for versions that are not selected, so each candidate is run.
  "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1 &&
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

path_of() { "$1" -c 'import sys; print(sys.executable)'; }

candidates() {
  printf '%s\n' python3.12 python3.13 python3 python
  ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python 2>/dev/null
  command -v uv >/dev/null && uv python find --no-python-downloads '>=3.12,<3.14' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
  fits "$PYTHON" && path_of "$PYTHON" && exit 0
  echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13 with venv and ensurepip" >&2
  exit 2
fi
while read -r candidate; do
  fits "$candidate" && path_of "$candidate" && exit 0
done < <(candidates)
echo "no Python 3.12 or 3.13 with venv on PATH, in pyenv or in uv: install one, or give its path as PYTHON=..." >&2
exit 2
