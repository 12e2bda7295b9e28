"""A result as JSON and as lines of text, and times in figures that people read."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from checks import Refused

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Spread:
  """Seconds of one application over the repeats."""

  median: float
  p10: float
  p90: float
  least: float
  most: float

  @classmethod
  def of(cls, values: Sequence[float]) -> Spread:
    """Of one or more values."""
    return cls(statistics.median(values), quantile(values, 0.1), quantile(values, 0.9), min(values), max(values))


def quantile(values: Sequence[float], share: float) -> float:
  """Returns the value below which a share of them lies, between two of them linearly.

  Raises:
    Refused: if there is none.
  """
  if not values:
    raise Refused("a quantile of nothing was asked for: nothing was measured")
  import numpy as np

  return float(np.quantile(values, share))


def write(path: str, result: Mapping[str, Any]) -> None:
  """Writes a result as JSON, whole or not at all. Raises InputError if it cannot be written."""
  from kimi_k3.cli.inputs import write_whole

  text = json.dumps(result, indent=1, allow_nan=False) + "\n"
  write_whole(path, lambda file: file.write(text.encode()))


def table(result: Mapping[str, Any]) -> str:
  """Returns a result as lines of text."""
  lines = [
    f"{result['subject']}, preset {result['preset']}: {machine_line(result)}",
    f"{'workload':32} {'name':24} {'median':>11} {'p10':>11} {'p90':>11} {'tok/s':>11} {'bound':>11} {'x bound':>8}",
  ]
  for row in result["results"]:
    seconds = row["seconds"]
    speed = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}"
    bound = "" if row["bound_seconds"] is None else shown(row["bound_seconds"])
    ratio = "" if row["ratio_to_bound"] is None else f"{row['ratio_to_bound']:.1f}"
    times = " ".join(f"{shown(seconds[key]):>11}" for key in ("median", "p10", "p90"))
    lines.append(f"{row['workload']:32} {row['name']:24} {times} {speed:>11} {bound:>11} {ratio:>8}")
  for row in result["ratios"]:
    speed = row["speed_up"]
    lines.append(
      f"{row['workload']}: {row['name']} is {speed['median']:.2f} times as fast as {row['against']} "
      f"(p10 {speed['p10']:.2f}, p90 {speed['p90']:.2f}, {row['pairs']} pairs)"
    )
  lines += [f"absent: {one['name']}: {one['reason']}" for one in result["absent"]]
  lines += [f"refused: {one['workload']}: {one['reason']}" for one in result["refused"]]
  lines += [f"note: {text}" for text in result["notes"]]
  return "\n".join(lines)


def shown(seconds: float) -> str:
  """Returns a time with its unit."""
  for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
    if seconds * factor >= 1:
      return f"{seconds * factor:.3g} {unit}"
  return f"{seconds * 1e9:.3g} ns"


def machine_line(result: Mapping[str, Any]) -> str:
  """Returns where a result was measured, in words."""
  env, roof = result["environment"], result["roof"]
  where = (
    f"{env['devices']} x {env['device']} ({env['platform']}), {env['cpu']}, {env['cores']} cores, load {env['load']}"
  )
  return f"{where}; copy {1e-9 * roof['copied']:.1f} GB/s, bounds of {roof['source']}"
