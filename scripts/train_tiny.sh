#!/usr/bin/env bash
# Trains kimi-k3-nano from the stored text, packs it, and measures it (docs/training.md):
#
#   scripts/train_tiny.sh [OUT] [key=value ...]
#
# OUT is out/train-tiny unless given; key=value go to the trainer. In OUT are, in the order they are made:
#   tokenizer/  ids/     the vocabulary, the text as ids
#   run/checkpoints/     what the trainer saved; metrics.jsonl and train.log beside it
#   checkpoint/          the released layout: safetensors, experts in MXFP4
#   converted/           the same for MaxText
#   eval.json            perplexity of the held-out text, exact match over the held-out questions
#   curve/               the same perplexity of every checkpoint, as trained
#   loss.json  loss.png  the loss of every step
# What is there is not made again, and nothing is there before it is complete: stopped at any point, the same command
# goes on, training from its last checkpoint. Exit code 1: the perplexity is not within 5 % of the stored model's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH=$root/.venv/bin:$PATH
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
export PYTHONUNBUFFERED=1
config=$root/configs/train-nano.yml
golden=$root/tests/golden/k3-nano
text=$golden/text
scripts=$root/scripts/train_tiny

say() { echo "train_tiny: $*" >&2; }

refuse() {
  say "$*"
  exit 2
}

out=out/train-tiny
if [ $# -gt 0 ] && [[ $1 != *=* ]]; then
  out=$1
  shift
fi
steps=$(sed -n 's/^steps: *\([0-9]*\).*/\1/p' "$config")
for setting in "$@"; do
  case $setting in
    base_output_directory=* | run_name=* | grain_*_files=* | metrics_file=*)
      refuse "$setting: found a key that this script sets; expected others, or OUT as the first argument" ;;
    steps=*) steps=${setting#steps=} ;;
    *=*) ;;
    *) refuse "$setting: expected key=value" ;;
  esac
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || refuse "steps=$steps: expected a number, 1 or more"

command -v kimi-k3 >/dev/null || refuse "kimi-k3 not found, expected it in .venv/bin: make install"
missing=$(python -c '
from importlib.util import find_spec
print(*(name for name in ("ml_collections", "regex", "matplotlib") if find_spec(name) is None))')
[ -z "$missing" ] || refuse "Python packages not found: $missing; expected those of the dev extra: make install"

mkdir -p "$out"
out=$(cd "$out" && pwd)
# Held by whatever this script starts too: a trainer outlives a script that is killed with -9.
exec 9>"$out/.lock"
python -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null ||
  refuse "$out: in use by another run of this script, or by a step that outlived one; wait for it or stop it"

# A checkpoint of another training would be gone on from as if it were of this one.
settings=$(
  printf '%s\n' "$@"
  cd "$root" && cksum configs/train-nano.yml configs/models/kimi-k3-nano.yml tests/golden/k3-nano/text/train.txt
)
[ -e "$out/settings" ] || echo "$settings" >"$out/settings"
[ "$settings" = "$(cat "$out/settings")" ] || {
  diff "$out/settings" - <<<"$settings" >&2 || true
  refuse "$out: begun with other settings, configs or text, as above; expected the same: take another OUT"
}

step() { # NAME MADE COMMAND...: says what runs and how long it took; skipped if OUT/MADE is there. The log is NAME.log.
  local name=$1 made=$2 begin=$SECONDS
  shift 2
  if [ -e "$out/$made" ]; then
    say "$name: $made is there"
    return
  fi
  say "$name ..."
  "$@" 2>>"$out/$name.log" || failed "$name" $?
  say "$name: $made after $((SECONDS - begin)) s"
}

failed() { # NAME CODE
  tail -n 20 "$out/$1.log" >&2
  say "$1 failed with exit code $2: all of it is in $out/$1.log"
  exit "$2"
}

# The functions below run where `set -e` does not hold, left of ||: hence their &&.

make_tokenizer() {
  local new=$out/tokenizer.partial
  rm -rf "$new" &&
    python "$scripts/questions.py" "$new/questions-train.jsonl" "$new/questions.jsonl" &&
    cmp "$new/questions.jsonl" "$text/questions.jsonl" && # else it would be asked what it was taught
    mv "$new/questions-train.jsonl" "$out/" && rm "$new/questions.jsonl" &&
    python "$scripts/learn_bpe.py" "$new" --vocab-size 1024 --text "$text/train.txt" \
      --questions "$out/questions-train.jsonl" &&
    mv "$new" "$out/tokenizer"
}

write_ids() {
  local new=$out/ids.partial
  rm -rf "$new" &&
    python "$scripts/write_ids.py" "$new/train" --tokenizer "$out/tokenizer" --text "$text/train.txt" \
      --questions "$out/questions-train.jsonl" &&
    mv "$new" "$out/ids"
}

train() {
  kimi-k3 run maxtext.trainers.pre_train.train "$config" base_output_directory="$out" run_name=run \
    "$data" metrics_file="$out/metrics.jsonl" "$@" 2>&1 |
    python "$scripts/progress.py" "$out/train.log" --steps "$steps" &&
    [ -e "$out/$last" ] # the trainer's exit code is 0 too where it was told to stop
}

evaluate() { # CONFIG OUT.json ARGS...
  kimi-k3 eval "$1" dtype=float32 matmul_precision=highest --text "$text/held-out.txt" --window 256 --out "$2" "${@:3}"
}

measure_curve() { # Of as many checkpoints as there are, the files that are not there yet.
  local saved
  mkdir -p "$out/curve" || return
  for saved in $(cd "$out/run/checkpoints" && printf '%s\n' * | grep -E '^[0-9]+$' | sort -n); do
    [ -e "$out/curve/$saved.json" ] || evaluate "$config" "$out/curve/$saved.json" tokenizer_path="$out/tokenizer" \
      load_parameters_path="$out/run/checkpoints/$saved/items" "$data" "$@" || return
  done
  touch "$out/curve/complete"
}

last=run/checkpoints/$((steps - 1))
data=grain_train_files="$out/ids/index|$out/ids/train" # MaxText takes no config without it
step tokenizer tokenizer make_tokenizer
step ids ids write_ids
step train "$last" train "$@"
step export checkpoint kimi-k3 export "$out/$last" "$out/checkpoint" --config "$config" "$data" "$@" --experts mxfp4 \
  --shard-size 1.5MB --tokenizer-from "$out/tokenizer"
step convert converted kimi-k3 convert "$out/checkpoint" "$out/converted"
step evaluate eval.json evaluate "$out/converted/decode.yml" "$out/eval.json" --questions "$text/questions.jsonl" \
  --max-new-tokens 48
step curve curve/complete measure_curve "$@"
step plot loss.png python "$scripts/plot.py" "$out/metrics.jsonl" --curve "$out/curve" --json "$out/loss.json" \
  --png "$out/loss.png"
if [ -e "$golden/checkpoint" ]; then
  step convert-stored stored kimi-k3 convert "$golden/checkpoint" "$out/stored"
  step evaluate-stored eval-stored.json evaluate "$out/stored/decode.yml" "$out/eval-stored.json"
  python "$scripts/report.py" "$out/eval.json" --stored "$out/eval-stored.json"
else
  say "no stored model to compare with: $golden/checkpoint is not there"
  python "$scripts/report.py" "$out/eval.json"
fi
