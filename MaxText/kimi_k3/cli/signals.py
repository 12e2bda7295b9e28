"""Ctrl-C and SIGTERM during long work on devices: asked to end first, ended if that takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

# What is waited for an end of its own. A cluster kills 30 s after SIGTERM, and a device call may take longer than that.
PATIENCE_SECONDS = 5.0


@contextlib.contextmanager
def told_of_signals(
  ask: Callable[[int], bool], last: Callable[[int], object], patience_seconds: float = PATIENCE_SECONDS
) -> Iterator[None]:
  """Handles SIGINT and SIGTERM by a thread of its own while the block runs, unless they are handled otherwise.

  Python runs a handler when the main thread is back from C++, and a compile takes minutes.

  Args:
    ask: Called with the first signal; whether the block then ends by itself. Runs beside the block.
    last: Called with the signal before the process ends, with exit code 128 + signal: at once if `ask` returned False,
      else at the next signal or when patience is at an end. Runs beside the block.
    patience_seconds: For the block to end by itself.
  """
  ours = [
    number
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
    if signal.getsignal(number) == default
  ]
  told, tell = os.pipe()
  os.set_blocking(tell, False)
  try:
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
  except ValueError:  # not the main thread, which alone gets signals
    os.close(told)
    os.close(tell)
    yield
    return
  over = threading.Event()

  def end(number: int) -> None:
    if not over.is_set():
      last(number)
      os._exit(128 + number)

  def wait() -> None:
    asked = False
    with open(told, "rb", buffering=0) as numbers:
      while number := numbers.read(1):
        if number[0] not in ours:
          continue
        if asked or not ask(number[0]):
          end(number[0])
        asked = True
        timer = threading.Timer(patience_seconds, end, number)
        timer.daemon = True
        timer.start()

  handlers = {number: signal.signal(number, _ignored) for number in ours}
  thread = threading.Thread(target=wait, daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    for number, handler in handlers.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(before)
    os.close(tell)
    thread.join()


def _ignored(*_: object) -> None:
  """Python's side of a signal: the thread has it."""
