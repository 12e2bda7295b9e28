"""Reads what MaxText's trainer says, keeps it in a file, and shows how far it is.

kimi-k3 run maxtext.trainers.pre_train.train ... 2>&1 | python scripts/train_tiny/progress.py train.log --steps 1000
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SHOWN_EVERY = 10  # steps
_STEP = re.compile(r"completed step: (\d+), seconds: ([\d.]+),.* loss: ([-\d.a-z]+), lm_loss")


def main() -> None:
  """Copies stdin to the end of the file and shows progress on stdout."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
  parser.add_argument("log", type=Path)
  parser.add_argument("--steps", type=int, required=True)
  options = parser.parse_args()
  # Ctrl-C is for the trainer, whose last words belong in the file.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with options.log.open("a") as log:
    for line in shown(kept(sys.stdin, log), options.steps):
      print(f"  {line}", flush=True)


def kept(lines: Iterator[str], log) -> Iterator[str]:
  """Yields the lines after each is written to the file."""
  for line in lines:
    log.write(line)
    log.flush()
    yield line


def shown(lines: Iterator[str], steps: int, clock=time.monotonic) -> Iterator[str]:
  """Yields what to show: the first step, every tenth, the last, with the time that is left as the steps so far went."""
  first = began = None
  for line in lines:
    if not (match := _STEP.search(line)):
      continue
    step, now = int(match[1]), clock()
    if first is None:
      first, began = step, now
    if step != first and (step + 1) % SHOWN_EVERY and step + 1 != steps:
      continue
    said = f"step {step + 1} of {steps}, loss {match[3]}"
    if step > first:
      pace = (now - began) / (step - first)
      said += f", {pace:.1f} s a step, {pace * (steps - 1 - step) / 60:.0f} min left"
    yield said


if __name__ == "__main__":
  main()
