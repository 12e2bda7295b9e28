#!/usr/bin/env bash
# The main job on the embedded checkpoint (kimi-k3-nano, docs/training.md), in a fresh directory: convert it, decode three
# prompts with float32 arithmetic, show the text, and compare every new token with the golden greedy continuation of the
# numpy reference (case k3-nano).
# The last line of the output has the tok/s that decode reports. DEMO_DIR=DIR keeps what it writes in DIR.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH=$root/.venv/bin:$PATH
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
case=$root/tests/golden/k3-nano

if [ -n "${DEMO_DIR:-}" ]; then
  mkdir -p "$DEMO_DIR"
  cd "$DEMO_DIR"
else
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  cd "$scratch"
fi

step() { # Shows the command and its results but for the speed, its log only if it fails; keeps NAME.out and NAME.log.
  local name=$1
  shift
  echo "\$ $*"
  "$@" >"$name.out" 2>"$name.log" || {
    local code=$?
    cat "$name.out" "$name.log" >&2
    echo "demo: '$*' failed with exit code $code" >&2
    exit "$code"
  }
  grep -v 'tok/s' "$name.out" || true
}

ln -sfn "$case/checkpoint" k3-nano
python "$root/scripts/demo_golden.py" prompts "$case/golden.npz" prompts.json
step convert kimi-k3 convert k3-nano converted
step decode kimi-k3 decode converted/decode.yml --prompt-ids prompts.json --max-new-tokens 48 --ignore-eos \
  --out tokens.json dtype=float32 matmul_precision=highest
python "$root/scripts/demo_golden.py" check "$case/golden.npz" tokens.json
cat decode.log decode.out | grep 'tok/s' | tail -n 1 | grep . || {
  echo "demo: decode printed no line with tok/s" >&2
  exit 1
}
