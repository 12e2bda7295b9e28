"""Says how good a trained model is, and whether it is as good as the stored one.

    python scripts/train_tiny/report.py OUT/eval.json --stored OUT/eval-stored.json

Reads results of `kimi-k3 eval`. Exit code 1: the perplexities differ by more than BOUND.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Of the stored perplexity. The same seeds on another CPU, or with other threads, round otherwise, and the training ends
# elsewhere: what the trained model is worth is what is reproduced, not its weights.
BOUND = 0.05


def main() -> int:
  """Prints the figures and returns the exit code."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
  parser.add_argument("result", type=Path)
  parser.add_argument("--stored", type=Path)
  options = parser.parse_args()
  result = json.loads(options.result.read_text())
  stored = json.loads(options.stored.read_text()) if options.stored else None
  lines, sound = compare(result, stored)
  print("\n".join(lines))
  return 0 if sound else 1


def compare(result: dict[str, Any], stored: dict[str, Any] | None) -> tuple[list[str], bool]:
  """Returns what to say, and whether the perplexity is within BOUND of the stored one, if there is one."""
  found, asked = result["perplexity"], result["exact_match"]
  lines = [
    f"perplexity of the held-out text: {found['perplexity']:.3f} a token, {found['bits_per_byte']:.4f} bits a byte",
    "exact match over the held-out questions: "
    + ", ".join(f"{name} {count} of {asked['total']}" for name, count in asked["correct"].items()),
  ]
  if stored is None:
    return lines, True
  expected = stored["perplexity"]["perplexity"]
  ratio = found["perplexity"] / expected
  sound = abs(ratio - 1) <= BOUND
  verdict = "within" if sound else "NOT within"
  return [*lines, f"the stored model has {expected:.3f}: ratio {ratio:.4f}, {verdict} {BOUND:.0%}"], sound


if __name__ == "__main__":
  sys.exit(main())
