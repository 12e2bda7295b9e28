"""What is said of rows under way, by a clock of the test's own."""

from __future__ import annotations

import io

from kimi_k3.cli.progress import LOG_SECONDS, RowProgress


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_in_a_log_a_line_comes_every_30_seconds_with_rows_rate_and_time_left():
  now, stream = [100.0], io.StringIO()
  with RowProgress(50, 10, stream=stream, clock=lambda: now[0]) as progress:
    for _ in range(70):
      now[0] += 1
      progress.row() if int(now[0]) % 6 == 0 else None
      progress.add(8)
  assert LOG_SECONDS == 30
  assert stream.getvalue() == (
    "15 of 50 rows, 8.0 tok/s, about 03:30 left\n"  # 5 of 40 rows in 30 seconds
    "20 of 50 rows, 8.0 tok/s, about 03:00 left\n"
  )
  assert progress.tokens == 560


def test_the_rate_is_of_the_last_seconds_only():
  now = [0.0]
  progress = RowProgress(10, 0, stream=io.StringIO(), clock=lambda: now[0])
  assert progress.line() == "0 of 10 rows, 0.0 tok/s, time left unknown"
  now[0] = 1000.0  # compiling
  progress.add(1)
  for _ in range(40):
    now[0] += 1
    progress.add(5)
  assert progress.line() == "0 of 10 rows, 5.0 tok/s, time left unknown"


def test_on_a_terminal_a_bar_shows_rows_and_rate():
  stream = Terminal()
  with RowProgress(4, 1, stream=stream) as progress:
    progress.add(7)
    for _ in range(3):
      progress.row()
  last = stream.getvalue().split("\r")[-1]
  assert "4/4" in last
  assert "tok/s" in last


def test_nothing_is_shown_where_nothing_shall_be():
  now, stream = [0.0], Terminal()
  with RowProgress(4, 1, shown=False, stream=stream, clock=lambda: now[0]) as progress:
    now[0] = 100
    progress.row()
    progress.add(3)
  assert (stream.getvalue(), progress.tokens) == ("", 3)
