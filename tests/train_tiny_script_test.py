"""scripts/train_tiny.sh: the order of its steps, what it says, and that it goes on where it was stopped."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
SCRIPT = REPO / "scripts" / "train_tiny.sh"
STEPS = 4


@pytest.fixture
def script(monkeypatch):
  """Imports a script of scripts/train_tiny, where they find each other."""
  monkeypatch.syspath_prepend(REPO / "scripts" / "train_tiny")
  return importlib.import_module


# With a kimi-k3 that makes what the real one would, in no time

# $1 is the verb. eval takes: eval CONFIG ... --out FILE.
FAKE = """\
echo "$*" >>"$CALLS"
case "$1" in "$FAIL") echo "kimi-k3: planted fault" >&2; exit 2 ;; esac
case "$1" in
run)
  for i in 0 1 2 3; do
    echo "completed step: $i, seconds: 1.0, x: 1, loss: 7.$i, lm_loss: 7.$i"
    echo '{"step": '$i'.0, "learning/loss": 7.'$i', "learning/current_learning_rate": 0.1, \
"learning/total_weights": 9.0}' >>"$OUT/metrics.jsonl"
  done
  mkdir -p "$OUT/run/checkpoints/2" "$OUT/run/checkpoints/3" "$OUT/run/checkpoints/4.orbax-checkpoint-tmp" ;;
export | convert) mkdir "$3" ;;
eval)
  while [ "$1" != --out ]; do shift; done
  printf '{"perplexity": {"perplexity": %s, "nats_per_token": 2, "bits_per_byte": 1},' \
    "$(case "$2" in */eval-stored.json) echo 10 ;; *) echo "${PERPLEXITY:-10.4}" ;; esac)" >"$2"
  echo '"exact_match": {"total": 35, "correct": {"strict": 3, "flexible": 4}}}' >>"$2" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
  """A checkout with the script and a kimi-k3 that only looks so; the vocabulary and the ids are made already."""
  root = tmp_path / "checkout"
  bin_dir = root / ".venv" / "bin"
  bin_dir.mkdir(parents=True)
  (root / "scripts").mkdir()
  shutil.copy(SCRIPT, root / "scripts")
  (root / "scripts" / "train_tiny").symlink_to(REPO / "scripts" / "train_tiny")
  (root / "configs").symlink_to(REPO / "configs")
  text = root / "tests" / "golden" / "k3-nano" / "text"
  text.parent.mkdir(parents=True)
  text.symlink_to(REPO / "tests" / "golden" / "k3-nano" / "text")
  for name in ("tokenizer", "ids"):
    (tmp_path / "out" / name).mkdir(parents=True)
  write_command(bin_dir / "kimi-k3", FAKE)
  write_command(bin_dir / "python", f'exec {sys.executable} "$@"')
  return root


def write_command(path: Path, script: str) -> None:
  path.write_text(f"#!/bin/sh\n{script}\n")
  path.chmod(0o755)


def run(checkout: Path, *settings: str, **environment: str) -> tuple[int, str, list[str]]:
  """Exit code, what was said, and the verbs that were called."""
  out, calls = checkout.parent / "out", checkout.parent / "calls"
  calls.unlink(missing_ok=True)
  environment = os.environ | {"OUT": str(out), "CALLS": str(calls), "FAIL": "nothing"} | environment
  command = ["bash", checkout / "scripts" / "train_tiny.sh", out, *(settings or [f"steps={STEPS}"])]
  done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
  said = calls.read_text().splitlines() if calls.exists() else []
  return done.returncode, done.stdout + done.stderr, [line.split()[0] for line in said]


def test_the_steps_come_in_order_and_none_comes_again(checkout):
  code, said, verbs = run(checkout)
  assert code == 0, said
  assert verbs == ["run", "export", "convert", "eval", "eval", "eval"]
  assert "step 4 of 4, loss 7.3" in said
  assert "perplexity of the held-out text: 10.400 a token, 1.0000 bits a byte" in said
  assert "strict 3 of 35, flexible 4 of 35" in said
  assert "no stored model to compare with" in said
  loss = json.loads((checkout.parent / "out" / "loss.json").read_text())
  assert loss["steps"] == [[i, float(f"7.{i}"), 0.1, 9] for i in range(STEPS)]
  assert [point["step"] for point in loss["held_out"]] == [2, 3]
  assert (checkout.parent / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
  code, said, verbs = run(checkout)
  assert (code, verbs) == (0, [])
  assert f"train: run/checkpoints/{STEPS - 1} is there" in said


def test_a_step_that_failed_is_shown_and_the_same_command_goes_on_from_it(checkout):
  (checkout.parent / "out" / "loss.png").touch()  # a plot costs seconds
  code, said, verbs = run(checkout, FAIL="convert")
  assert (code, verbs) == (2, ["run", "export", "convert"])
  assert "kimi-k3: planted fault" in said
  assert "convert failed with exit code 2" in said
  assert run(checkout)[2] == ["convert", "eval", "eval", "eval"]


def test_a_trainer_that_fails_or_saves_nothing_stops_the_script(checkout):
  code, said, verbs = run(checkout, FAIL="run")
  assert (code, verbs) == (2, ["run"])
  assert "kimi-k3: planted fault" in said
  shutil.rmtree(checkout.parent / "out" / "run", ignore_errors=True)
  (checkout.parent / "out" / "settings").unlink()
  code, said, verbs = run(checkout, "steps=9")  # the fake saves step 3 and ends
  assert (code, verbs) == (1, ["run"])
  assert "train failed with exit code 1" in said


def test_the_stored_model_decides_the_exit_code(checkout):
  (checkout / "tests" / "golden" / "k3-nano" / "checkpoint").mkdir()
  (checkout.parent / "out" / "loss.png").touch()  # a plot costs seconds
  code, said, _ = run(checkout)
  assert code == 0, said
  assert "the stored model has 10.000: ratio 1.0400, within 5%" in said
  (checkout.parent / "out" / "eval.json").unlink()
  code, said, verbs = run(checkout, PERPLEXITY="9.4")
  assert (code, verbs) == (1, ["eval"])
  assert "ratio 0.9400, NOT within 5%" in said


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (["run_name=mine"], "run_name=mine: found a key that this script sets"),
    (["steps=few"], "steps=few: expected a number, 1 or more"),
    (["steps=4", "elsewhere"], "elsewhere: expected key=value"),
  ],
)
def test_what_would_be_ignored_is_refused(checkout, settings, said):
  code, output, verbs = run(checkout, *settings)
  assert (code, verbs) == (2, [])
  assert said in output


def test_an_out_of_other_settings_is_refused(checkout):
  run(checkout, FAIL="run")
  code, said, verbs = run(checkout, "steps=4", "learning_rate=1e-3")
  assert (code, verbs) == (2, [])
  assert "> learning_rate=1e-3" in said
  assert "begun with other settings" in said


def test_an_out_that_is_in_use_is_refused(checkout):
  with (checkout.parent / "out" / ".lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    code, said, verbs = run(checkout)
  assert (code, verbs) == (2, [])
  assert "in use by another run of this script" in said


def test_packages_that_are_missing_are_named(checkout):
  python = checkout / ".venv" / "bin" / "python"
  write_command(python, f'case "$*" in *find_spec*) echo ml_collections ;; *) exec {sys.executable} "$@" ;; esac')
  code, said, verbs = run(checkout)
  assert (code, verbs) == (2, [])
  assert "Python packages not found: ml_collections; expected those of the dev extra: make install" in said


# The parts


def test_progress_says_the_time_that_is_left(script):
  times = iter(range(0, 1000, 2))  # seconds: 2 a step
  lines = ["warning: x"] + [f"completed step: {i}, seconds: 2.0, loss: 7.25, lm_loss: 7.25" for i in range(100, 121)]
  assert list(script("progress").shown(iter(lines), 200, lambda: next(times))) == [
    "step 101 of 200, loss 7.25",
    "step 110 of 200, loss 7.25, 2.0 s a step, 3 min left",
    "step 120 of 200, loss 7.25, 2.0 s a step, 3 min left",
  ]


def metrics(step: int, loss: float) -> str:
  return json.dumps(
    {"step": float(step), "learning/loss": loss, "learning/current_learning_rate": 0.1, "learning/total_weights": 9.0}
  )


def test_of_a_step_that_was_done_twice_the_later_counts_and_a_missing_one_is_named(script):
  plot = script("plot")
  evaluated = json.dumps({"step": 0.0, "eval/avg_loss": 3.0})
  text = "\n".join([metrics(0, 7.0), metrics(1, 6.0), metrics(2, 5.0), evaluated, metrics(1, 6.5), metrics(4, 4.0)])
  run = plot.read_metrics(text)
  assert run == [(0, 7.0, 0.1, 9), (1, 6.5, 0.1, 9), (2, 5.0, 0.1, 9), (4, 4.0, 0.1, 9)]
  assert json.loads(plot.encoded(run, []))["missing_steps"] == [3]


def test_a_damaged_line_of_metrics_is_named(script):
  with pytest.raises(ValueError, match="line 2 of the metrics is no JSON"):
    script("plot").read_metrics(metrics(0, 7.0) + "\n" + metrics(1, 6.0)[:20])


# The real thing

SMALL_STEPS = 6
SMALL = [f"steps={SMALL_STEPS}", "checkpoint_period=2", "per_device_batch_size=2"]


def real(out: Path) -> subprocess.Popen[str]:
  # Its own group of processes, so that all of them can be killed at once.
  return subprocess.Popen(
    ["bash", SCRIPT, out, *SMALL],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )


@pytest.mark.skipif(not os.environ.get("TRAIN_TINY"), reason="trains twice, a quarter of an hour: set TRAIN_TINY=1")
@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_same_losses_and_a_checkpoint_that_is_measured(script, tmp_path):
  read = script("plot").read_metrics
  whole = real(tmp_path / "whole")
  said = whole.communicate(timeout=3000)[0]
  stored = (REPO / "tests" / "golden" / "k3-nano" / "checkpoint").exists()
  assert whole.returncode == (1 if stored else 0), said  # of so few steps the model is bad
  assert "perplexity of the held-out text" in said
  assert "of 35" in said
  losses = read((tmp_path / "whole" / "metrics.jsonl").read_text())
  assert [row[0] for row in losses] == list(range(SMALL_STEPS))

  killed = real(tmp_path / "killed")
  deadline = time.monotonic() + 1500
  while not (tmp_path / "killed" / "run" / "checkpoints" / "2").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  os.killpg(killed.pid, signal.SIGKILL)
  killed.communicate()
  with (tmp_path / "killed" / ".lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # until the trainer is gone, whose memory takes a while to be given back
  again = real(tmp_path / "killed")
  said = again.communicate(timeout=3000)[0]
  assert again.returncode == whole.returncode, said
  # The steps after the checkpoint: from its state and the data that comes next. Same machine, same program, same bits.
  assert read((tmp_path / "killed" / "metrics.jsonl").read_text())[-3:] == losses[-3:]
  shards = [sorted((tmp_path / name / "checkpoint").glob("*.safetensors")) for name in ("whole", "killed")]
  assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]
