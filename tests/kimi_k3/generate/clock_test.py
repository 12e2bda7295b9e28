from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from kimi_k3.generate.clock import CompileClock

COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def report(monkeypatch):
  """Returns a function: a clock and spans (start, end), reported in the order they ended, as JAX does."""

  def make(*spans: tuple[float, float], event: str = COMPILE) -> CompileClock:
    clock = CompileClock()
    for start, end in sorted(spans, key=lambda span: span[1]):
      monkeypatch.setattr(time, "perf_counter", lambda end=end: end)
      clock._record(event, end - start)
    return clock

  return make


@pytest.mark.parametrize(
  ("spans", "expected"),
  [
    ((), 0.0),
    (((1.0, 3.0),), 2.0),
    (((1.0, 3.0), (5.0, 6.0)), 3.0),
    (((1.0, 9.0), (2.0, 3.0), (4.0, 5.0)), 8.0),  # nested: tracing inside tracing
    (((1.0, 5.0), (1.0, 2.0), (3.0, 7.0)), 6.0),  # overlapping
    (((-5.0, -1.0), (11.0, 12.0)), 0.0),  # before and after
    (((-5.0, 2.0), (9.0, 15.0)), 3.0),  # cut at both ends
    (((-5.0, 15.0), (2.0, 3.0)), 10.0),
  ],
)
def test_the_union_of_the_spans_inside_an_interval_is_counted(report, spans, expected):
  assert report(*spans).compiling(0.0, 10.0) == pytest.approx(expected)


def test_other_events_do_not_count(report):
  assert report((1.0, 3.0), event="/jax/checkpoint/write_duration").compiling(0.0, 10.0) == 0.0


def test_a_first_call_compiles_and_a_second_does_not():
  clock = CompileClock()
  double = jax.jit(lambda x: 2 * x + 0.125)
  x = jnp.ones(3).block_until_ready()

  def call() -> tuple[float, float]:
    start = time.perf_counter()
    double(x).block_until_ready()
    end = time.perf_counter()
    return clock.compiling(start, end), end - start

  compiling, wall = call()
  assert 0.0 < compiling <= wall
  assert call()[0] == 0.0
