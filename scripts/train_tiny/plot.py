"""Draws the loss of a training run, and writes it as JSON.

    python scripts/train_tiny/plot.py OUT/metrics.jsonl --curve OUT/curve --json loss.json --png loss.png

metrics.jsonl is MaxText's metrics_file, a line a step. A run that was stopped and went on has steps twice, of which the
later counts, and may lack two up to a checkpoint: MaxText writes a step after the next one, and after it has saved.
The curve is a directory of STEP.json, results of `kimi-k3 eval` on checkpoints. MaxText's own evaluation is not read:
its step 0 wipes metrics_file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("step", "loss", "learning_rate", "tokens")
SMOOTHED_OVER = 20  # steps


def main() -> None:
  """Writes both files."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
  parser.add_argument("metrics", type=Path)
  parser.add_argument("--curve", type=Path, help="directory of STEP.json")
  parser.add_argument("--json", type=Path, required=True)
  parser.add_argument("--png", type=Path, required=True)
  options = parser.parse_args()
  curve = read_curve(options.curve) if options.curve else []
  run = read_metrics(options.metrics.read_text())
  options.json.write_text(encoded(run, curve))
  draw(run, curve, options.png)


def read_metrics(text: str) -> list[tuple[int, float, float, int]]:
  """Returns COLUMNS of each step, in order: loss in nats a token, tokens that were predicted in it.

  Raises:
    ValueError: if a line is not one of MaxText's, or there are none.
  """
  steps = {}
  for number, line in enumerate(text.splitlines(), 1):
    try:
      found = json.loads(line)
    except ValueError as error:
      raise ValueError(f"line {number} of the metrics is no JSON: {line[:80]!r}") from error
    if "learning/loss" not in found:  # of MaxText's own evaluation
      continue
    steps[int(found["step"])] = (
      found["learning/loss"],
      found["learning/current_learning_rate"],
      int(found["learning/total_weights"]),
    )
  if not steps:
    raise ValueError("the metrics hold no training step")
  return [(step, *steps[step]) for step in sorted(steps)]


def read_curve(directory: Path) -> list[dict[str, Any]]:
  """Returns step, perplexity, nats a token and bits a byte of each checkpoint that was measured, in order."""
  kinds = ("perplexity", "nats_per_token", "bits_per_byte")
  files = sorted(directory.glob("*.json"), key=lambda path: int(path.stem))
  found = [(int(path.stem), json.loads(path.read_text())["perplexity"]) for path in files]
  return [{"step": step} | {kind: measured[kind] for kind in kinds} for step, measured in found]


def encoded(run: list[tuple[int, float, float, int]], curve: list[dict[str, Any]]) -> str:
  """Returns JSON with a line a step."""
  missing = sorted({*range(run[-1][0])} - {step for step, *_ in run})
  head = {
    "loss": "nats a token, of the training batch of each step; held_out: of the text held out, after that step",
    "missing_steps": missing,
    "held_out": curve,
    "columns": COLUMNS,
  }
  rows = ",\n".join(f"  [{step}, {loss:.5g}, {rate:.5g}, {tokens}]" for step, loss, rate, tokens in run)
  return json.dumps(head, indent=1)[:-2] + f',\n "steps": [\n{rows}\n ]\n}}\n'


def draw(run: list[tuple[int, float, float, int]], curve: list[dict[str, Any]], path: Path) -> None:
  """Writes the plot: loss against the step, logarithmic, and the learning rate below."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  from matplotlib.ticker import FuncFormatter, NullFormatter

  step, loss, rate, _ = (np.array(column) for column in zip(*run, strict=True))
  figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
  FigureCanvasAgg(figure)
  upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
  upper.plot(step, loss, color="0.75", linewidth=0.8, label="training batch")
  if len(run) > SMOOTHED_OVER:
    mean = np.convolve(loss, np.ones(SMOOTHED_OVER) / SMOOTHED_OVER, "valid")
    upper.plot(step[SMOOTHED_OVER - 1 :], mean, color="C0", label=f"mean of the last {SMOOTHED_OVER} batches")
  if curve:
    held_out = [point["nats_per_token"] for point in curve]
    upper.plot([p["step"] for p in curve], held_out, "o", color="C1", label="held-out text", markersize=5)
    upper.annotate(
      f"{held_out[-1]:.3f}", (curve[-1]["step"], held_out[-1]), (0, 7), textcoords="offset points", ha="center"
    )
  upper.set_yscale("log")
  upper.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
  upper.yaxis.set_minor_formatter(
    FuncFormatter(lambda y, _: f"{y:g}") if loss.max() < 10 * loss.min() else NullFormatter()
  )
  upper.set_ylabel("loss, nats a token")
  upper.set_title("kimi-k3-nano: loss in training")
  upper.grid(True, which="both", alpha=0.3)
  upper.legend()
  lower.plot(step, rate, color="C2")
  lower.set_ylabel("learning rate")
  lower.set_xlabel("step")
  lower.grid(True, alpha=0.3)
  whole = path.with_suffix(".partial.png")
  figure.savefig(whole, metadata={"Software": None})  # no date or version: the same run gives the same bytes
  whole.replace(path)


if __name__ == "__main__":
  main()
