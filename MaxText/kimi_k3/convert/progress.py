"""A progress bar for long work: bytes, rate, time left. In a log file a line now and then instead of a moving bar."""

from __future__ import annotations

import sys
import threading

import tqdm

_LOG_SECONDS = 30.0  # between two lines where nobody watches


class Progress:
  """A bar that several threads may move. Use it as a context."""

  def __init__(self, what: str, total: int, *, done: int = 0):
    """Shows the bar on stderr.

    Args:
      what: Before the bar, one word.
      total: In bytes.
      done: By earlier runs, in bytes: shown, and not counted in the rate.
    """
    self._lock = threading.Lock()
    interval = 0.2 if sys.stderr.isatty() else _LOG_SECONDS
    self._bar = tqdm.tqdm(
        total=total, initial=done, desc=what, unit="B", unit_scale=True, unit_divisor=1024, smoothing=0.05,
        mininterval=interval, maxinterval=max(10.0, interval),
    )  # fmt: skip

  def add(self, nbytes: int) -> None:
    """Moves the bar."""
    with self._lock:
      self._bar.update(nbytes)

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.close()
