"""Rows done, tokens a second and the time left: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable
from typing import Any

LOG_SECONDS = 30.0  # between two lines where nobody watches
_WINDOW_SECONDS = 30.0  # that a rate is of


class RowProgress:
  """Shows how far the rows of a run are. Use it as a context."""

  def __init__(
    self, total: int, done: int, *, shown: bool = True, stream: Any = None, clock: Callable[[], float] = time.monotonic
  ):
    """Starts to count the time.

    Args:
      total: Rows.
      done: By earlier runs: shown, and not counted in rates.
      shown: Whether anything is.
      stream: Where; None: stderr.
      clock: Seconds.
    """
    self._total, self._done, self._before, self._shown, self._clock = total, done, done, shown, clock
    self._stream = sys.stderr if stream is None else stream
    self._started = self._said = clock()
    self._recent = collections.deque([(self._started, 0)])  # tokens so far, by time
    self.tokens = 0
    self._bar: Any = None
    if shown and self._stream.isatty():
      from tqdm import tqdm

      self._bar = tqdm(total=total, initial=done, unit="row", smoothing=0, file=self._stream)

  def row(self) -> None:
    """Counts a row."""
    self._done += 1
    if self._bar is not None:
      self._bar.update()

  def add(self, tokens: int) -> None:
    """Counts new tokens, and shows it all if it is time."""
    self.tokens += tokens
    now = self._clock()
    self._recent.append((now, self.tokens))
    while len(self._recent) > 2 and now - self._recent[1][0] > _WINDOW_SECONDS:
      self._recent.popleft()
    if self._bar is not None:
      self._bar.set_postfix_str(f"{self._rate():.1f} tok/s", refresh=False)
    elif self._shown and now - self._said >= LOG_SECONDS:
      self._said = now
      print(self.line(), file=self._stream, flush=True)

  def line(self) -> str:
    """Returns what is known now."""
    return f"{self._done} of {self._total} rows, {self._rate():.1f} tok/s, {self._left()}"

  def _rate(self) -> float:
    (start, before), (end, now) = self._recent[0], self._recent[-1]
    return (now - before) / (end - start) if end > start else 0.0

  def _left(self) -> str:
    from tqdm import tqdm

    rows = self._done - self._before
    if not rows:
      return "time left unknown"
    seconds = (self._clock() - self._started) * (self._total - self._done) / rows
    return f"about {tqdm.format_interval(seconds)} left"

  def __enter__(self) -> RowProgress:
    return self

  def __exit__(self, *_: object) -> None:
    if self._bar is not None:
      self._bar.close()
