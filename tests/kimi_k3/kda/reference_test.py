import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import l2_norm
from kimi_k3.kda.reference import kda_recurrence, kda_step, l2_normalize

pytestmark = pytest.mark.strict_ranks

LENGTH = 129
# Every step rounds the state, by 6e-8 of its size, and without decay the roundings of all steps add up.
TOLERANCE = LENGTH * 6e-8

_recurrence = jax.jit(kda_recurrence)


def test_normalisation_adds_eps_once_under_the_root():
  x = np.random.default_rng(0).standard_normal((7, 32)) * np.logspace(-6, 3, 7)[:, None]
  normal = l2_normalize(jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(normal, l2_norm(x), rtol=1e-6)
  np.testing.assert_allclose(l2_normalize(jnp.array([3e-3, 4e-3])), np.array([3e-3, 4e-3]) / np.sqrt(26e-6), rtol=1e-6)


def test_zero_vector_normalises_to_zero_with_a_finite_gradient():
  zero = jnp.zeros((1, 4))
  np.testing.assert_array_equal(l2_normalize(zero), zero)
  assert np.all(np.isfinite(jax.grad(lambda x: l2_normalize(x).sum())(zero)))


def test_low_precision_input_is_normalised_in_float32():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 32)), jnp.bfloat16)
  assert l2_normalize(x).dtype == jnp.float32
  np.testing.assert_array_equal(l2_normalize(x), l2_normalize(x.astype(jnp.float32)))


def test_recurrence_is_the_numpy_references(truth, assert_rows_close):
  o, state = _recurrence(*truth.tokens(0, LENGTH), truth.state)
  assert_rows_close(o, truth.o[:, :LENGTH], TOLERANCE)
  assert_rows_close(state, truth.states[LENGTH], TOLERANCE)


def test_steps_equal_the_recurrence(truth, assert_rows_close):
  step, state, outputs = jax.jit(kda_step), truth.state, []
  for t in range(65):
    o, state = step(*(x[:, t] for x in truth.inputs), state)
    outputs.append(o)
  assert_rows_close(jnp.stack(outputs, axis=1), truth.o[:, :65], TOLERANCE)
  assert_rows_close(state, truth.states[65], TOLERANCE)


def test_step_with_no_decay_and_no_learning_leaves_the_state_bit_identical(truth):
  q, k, v, g, beta = (x[:, 0] for x in truth.inputs)
  _, state = kda_step(q, k, v, 0 * g, 0 * beta, truth.state)
  np.testing.assert_array_equal(state, truth.state)


def test_document_in_a_packed_row_sees_an_empty_state(truth):
  resets = jnp.zeros((len(truth.state), LENGTH), bool).at[:, jnp.array([43, 86])].set(True)
  o, state = _recurrence(*truth.tokens(0, LENGTH), truth.state, resets=resets)
  for start, stop, before in ((0, 43, truth.state), (43, 86, 0 * truth.state), (86, LENGTH, 0 * truth.state)):
    expected, after = _recurrence(*truth.tokens(start, stop), before)
    np.testing.assert_array_equal(o[:, start:stop], expected)
  np.testing.assert_array_equal(state, after)


def test_low_precision_inputs_give_float32(truth):
  low = [x.astype(jnp.bfloat16) for x in (*truth.tokens(0, 3), truth.state)]
  for o, state in (kda_recurrence(*low), kda_step(*(x[:, 0] for x in low[:5]), low[5])):
    assert (o.dtype, state.dtype) == (jnp.float32, jnp.float32)
