"""Signals to a process of its own: it is asked to end, and ended if it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from kimi_k3.cli.signals import told_of_signals

# Does not end by itself, as in a long compile: only the thread that handles signals runs.
PROGRAM = """
import sys, time
from kimi_k3.cli.signals import told_of_signals
ask = lambda number: print("asked", number, flush=True) or {asked}
with told_of_signals(ask, lambda number: print("last", number, flush=True), patience_seconds={patience}):
  print("ready", flush=True)
  time.sleep(60)
"""


@pytest.mark.parametrize(
  ("asked", "patience", "signals", "code", "said"),
  [
    (False, 30, [signal.SIGTERM], 143, "asked 15\nlast 15\n"),
    (True, 0.05, [signal.SIGINT], 130, "asked 2\nlast 2\n"),
    (True, 30, [signal.SIGTERM, signal.SIGINT], 130, "asked 15\nlast 2\n"),
  ],
)
def test_a_process_that_does_not_end_when_asked_is_ended(asked, patience, signals, code, said):
  program = PROGRAM.format(asked=asked, patience=patience)
  process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
  assert process.stdout is not None
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signals[0])
  first = process.stdout.readline()
  for number in signals[1:]:
    process.send_signal(number)
  assert first + process.stdout.read() == said
  assert process.wait(timeout=60) == code


def test_what_was_before_is_there_again():
  before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
  threads = threading.active_count()
  with told_of_signals(lambda _: True, lambda _: None):
    assert signal.getsignal(signal.SIGTERM) not in before
  assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
  assert threading.active_count() == threads


def test_a_signal_that_is_ignored_stays_ignored():
  before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
  try:
    with told_of_signals(lambda _: pytest.fail("asked"), lambda _: None):
      os.kill(os.getpid(), signal.SIGTERM)
      assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
  finally:
    signal.signal(signal.SIGTERM, before)


def test_another_thread_than_the_main_one_goes_without():
  done = []

  def work() -> None:
    with told_of_signals(lambda _: True, lambda _: None):
      done.append(True)

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert done == [True]
