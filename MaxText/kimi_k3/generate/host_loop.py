"""The decoding loop on the host, a call of the model a step: what the device's loop is measured and tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kimi_k3.generate.device_loop import LENGTH, NOT_FINITE, RUNNING, STOP, Decoded, Plan, Rows
from kimi_k3.generate.sampling import sample_everywhere


def decode_by_steps(
  step: Callable[[np.ndarray], Any], rows: Rows, used: Sequence[bool], plan: Plan, *, buffer: int
) -> Decoded:
  """Returns what an engine's `decode` does.

  Args:
    step: Tokens [B] of all slots to the logits [B, X] of the next ones. A row that has ended is fed on, for nothing.
    rows: Of all slots.
    used: Which slots hold a row.
    plan: When to end.
    buffer: Steps at most.
  """
  active = np.array(used, bool)
  tokens, counts = np.array(rows.tokens), np.array(rows.counts)
  given = np.full((len(active), buffer), -1, np.int32)
  status = np.full(len(active), RUNNING, np.int32)
  steps, first = 0, int(active.sum())
  while steps < min(int(plan.max_steps), buffer) and active.any() and first - active.sum() < int(plan.until_finished):
    found, finite = sample_everywhere(step(tokens), rows.draws, counts)
    got = active & finite
    counts = counts + got
    given[:, steps] = np.where(got, found, -1)
    ended = np.where(np.isin(found, plan.stop_ids), STOP, np.where(counts >= rows.limits, LENGTH, RUNNING))
    status = np.where(active, np.where(finite, ended, NOT_FINITE), status)
    active = active & (status == RUNNING)
    tokens = np.where(active, found, tokens).astype(np.int32)
    steps += 1
  return Decoded(given, (counts - rows.counts).astype(np.int32), status.astype(np.int32), steps)
