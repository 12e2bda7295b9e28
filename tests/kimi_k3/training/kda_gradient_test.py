"""Gradients of KDA alone: each implementation against autodiff of the definition, token by token.

The definition sees only a row's real tokens, moved together. All in float32 with full-precision products.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.kda.gate import decay_gate
from kimi_k3.kda.kernel import run_kda
from kimi_k3.kda.reference import kda_recurrence, l2_normalize

pytestmark = [pytest.mark.slow, pytest.mark.strict_ranks]

NAMES = ("q", "k", "v", "a", "a_log", "dt_bias", "beta", "state")
LENGTH, HEADS, KEY_DIM, VALUE_DIM = 150, 3, 32, 48
# Of each row: (first token, tokens) of its documents; the tokens between and behind are pads. A document may start
# anywhere relative to chunks of 64 and sub-chunks of 16.
ROWS = [
  [(0, 150)],
  [(0, 1), (1, 2), (3, 3), (6, 37), (43, 65), (108, 42)],
  [(0, 64), (64, 64), (128, 5)],
  [(5, 58), (63, 2), (70, 17), (100, 49)],
  [],
]
# Of the largest entry: the definition rounds its state at each of a hundred and fifty steps, there and back.
PORTABLE_TOLERANCE = 2 * LENGTH * 6e-8
TOKAMAX_TOLERANCE = 1e-4  # its exponents are differences of running sums, whose last place is 3e-5: see kernel_test.py


@pytest.fixture(scope="module")
def args():
  rng = np.random.default_rng(0)
  shape = (len(ROWS), LENGTH, HEADS)
  q, k, a = rng.standard_normal((3, *shape, KEY_DIM))
  v, beta = rng.standard_normal((*shape, VALUE_DIM)), rng.random(shape)
  dt_bias = rng.uniform(-6.5, -2.0, (HEADS, KEY_DIM))
  dt_bias[1] += 12.0  # a head that decays at the floor all the time
  state = rng.standard_normal((len(ROWS), HEADS, KEY_DIM, VALUE_DIM))
  arrays = (3 * q, 0.2 * k, v, a, np.log([1.0, 4.0, 16.0]), dt_bias, beta, state)
  return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@pytest.fixture(scope="module")
def cotangents():
  rng = np.random.default_rng(1)
  o, state = (len(ROWS), LENGTH, HEADS, VALUE_DIM), (len(ROWS), HEADS, KEY_DIM, VALUE_DIM)
  return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (o, state))


def masks(rows):
  valid, resets = np.zeros((2, len(rows), LENGTH), bool)
  for r, documents in enumerate(rows):
    for i, (start, count) in enumerate(documents):
      valid[r, start : start + count] = True
      resets[r, start] = i > 0
  return jnp.asarray(valid), jnp.asarray(resets)


def definition(args, cotangents, rows, lower_bound):
  """The same sum of outputs and last states by the recurrence, over a row's real tokens moved together."""
  valid, resets = masks(rows)
  order = jnp.argsort(~valid, axis=1, stable=True)  # real tokens first, in their order
  gather = lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)  # noqa: E731
  q, k, v, a, beta, valid, resets, weights = map(gather, (*args[:4], args[6], valid, resets, cotangents[0]))
  g = decay_gate(a, *args[4:6], lower_bound=lower_bound)
  # What is behind them neither decays nor writes.
  g, beta = jnp.where(valid[..., None, None], g, 0.0), jnp.where(valid[..., None], beta, 0.0)
  o, state = kda_recurrence(l2_normalize(q), l2_normalize(k), v, g, beta, args[7], resets=resets)
  o = jnp.where(valid[..., None, None], o, 0.0)
  return jnp.sum(o * weights) + jnp.sum(state * cotangents[1])


def implemented(args, cotangents, valid, resets, *, lower_bound, implementation):
  o, state = run_kda(*args, lower_bound=lower_bound, valid=valid, resets=resets, implementation=implementation)
  return jnp.sum(o * cotangents[0]) + jnp.sum(state * cotangents[1])


def assert_close(found, expected, tolerance):
  faults = {}
  for name, a, b in zip(NAMES, found, expected, strict=True):
    error = float(jnp.abs(a - b).max() / jnp.abs(b).max())
    if not error <= tolerance:
      faults[name] = error
  assert not faults, faults


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_portable_has_the_gradients_of_the_definition_with_packed_documents_and_pads(args, cotangents, lower_bound):
  program = functools.partial(implemented, lower_bound=lower_bound, implementation="portable")
  found = jax.jit(jax.grad(program))(args, cotangents, *masks(ROWS))
  exact = functools.partial(definition, rows=ROWS, lower_bound=lower_bound)
  expected = jax.jit(jax.grad(exact))(args, cotangents)
  assert_close(found, expected, PORTABLE_TOLERANCE)
  pads = ~masks(ROWS)[0]
  for name, gradient in zip(NAMES, found, strict=True):
    if name in ("q", "k", "v", "a", "beta"):
      np.testing.assert_array_equal(gradient[pads], np.zeros_like(gradient[pads]), name)


def test_tokamax_has_the_gradients_of_the_definition_at_the_decay_floor_and_with_pads(args, cotangents):
  rows = [[(0, count)] for count in (150, 128, 65, 1)] + [[]]  # one document each: it takes no resets
  program = functools.partial(implemented, lower_bound=-5.0, implementation="tokamax_xla_chunked")
  found = jax.jit(jax.grad(program))(args, cotangents, masks(rows)[0], None)
  expected = jax.jit(jax.grad(functools.partial(definition, rows=rows, lower_bound=-5.0)))(args, cotangents)
  assert_close(found, expected, TOKAMAX_TOLERANCE)
