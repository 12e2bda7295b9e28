"""Wall time with the time spent compiling taken out, so that a first call can be told from a slow one."""

from __future__ import annotations

import itertools
import time

import jax

_COMPILE_EVENTS = "/jax/core/compile/"


class CompileClock:
  """Sums what JAX reports of tracing, lowering and compiling. Reports nest, so their union is counted."""

  def __init__(self) -> None:
    self._spans: list[tuple[float, float]] = []
    jax.monitoring.register_event_duration_secs_listener(self._record)

  def _record(self, event: str, duration_secs: float, **details: str | int) -> None:
    del details
    if event.startswith(_COMPILE_EVENTS):
      now = time.perf_counter()
      self._spans.append((now - duration_secs, now))

  def compiling(self, start: float, end: float) -> float:
    """Returns the seconds between two readings of time.perf_counter() in which JAX was compiling."""
    # Reported in the order they ended: those before the interval are not looked at, however many there were.
    recent = itertools.takewhile(lambda span: span[1] > start, reversed(self._spans))
    total, reached = 0.0, start
    for first, last in sorted(recent):
      first, last = max(first, reached), min(last, end)
      if last > first:
        total, reached = total + last - first, last
    return total
