"""A progress bar for long work: bytes, rate, time left. In a log file a line now and then instead of a moving bar."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, TextIO, cast

import tqdm

_LOG_SECONDS = 30.0  # between two lines where nobody watches


class _Harmless:
  """A stream that takes all that is written to it: a log disk that is full must not end hours of work."""

  def __init__(self, stream: Any):
    self._stream = stream

  def write(self, text: str) -> int:
    with contextlib.suppress(OSError, ValueError):
      if self._stream is not None:
        self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    with contextlib.suppress(OSError, ValueError):
      if self._stream is not None:
        self._stream.flush()

  def isatty(self) -> bool:
    with contextlib.suppress(OSError, ValueError):
      return self._stream is not None and self._stream.isatty()
    return False


def say(line: str) -> None:
  """Prints a line of the log to stderr, if that takes it."""
  stream = _Harmless(sys.stderr)
  stream.write(f"{line}\n")
  stream.flush()


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
    file = _Harmless(sys.stderr)
    interval = 0.2 if file.isatty() else _LOG_SECONDS
    self._bar = tqdm.tqdm(
        total=total, initial=done, desc=what, unit="B", unit_scale=True, unit_divisor=1024, smoothing=0.05,
        mininterval=interval, maxinterval=max(10.0, interval), file=cast(TextIO, file),
    )  # fmt: skip

  def add(self, nbytes: int) -> None:
    """Moves the bar."""
    with self._lock:
      self._bar.update(nbytes)

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.close()
