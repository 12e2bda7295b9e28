import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import sigmoid
from kimi_k3.errors import InputError
from kimi_k3.kda.gate import decay_gate

pytestmark = pytest.mark.strict_ranks

HEADS, KEY_DIM = 3, 8
A_LOG = jnp.log(jnp.array([1.0, 4.0, 16.0]))


def gate_inputs(scale=1.0):
  rng = np.random.default_rng(0)
  a = jnp.asarray(scale * rng.standard_normal((2, 5, HEADS, KEY_DIM)), jnp.float32)
  return a, jnp.asarray(rng.uniform(-6.5, -2.0, (HEADS, KEY_DIM)), jnp.float32)


def expected_gate(a, dt_bias, lower_bound):
  a, dt_bias, a_log = (np.asarray(x, np.float64) for x in (a, dt_bias, A_LOG))
  rate, biased = np.exp(a_log)[:, None], a + dt_bias
  return -rate * np.logaddexp(0.0, biased) if lower_bound is None else lower_bound * sigmoid(rate * biased)


@pytest.mark.parametrize("lower_bound", [-5.0, -2.0, None])
def test_gate_is_the_formula_in_float64(lower_bound):
  a, dt_bias = gate_inputs(scale=3.0)
  g = decay_gate(a, A_LOG, dt_bias, lower_bound=lower_bound)
  assert g.dtype == jnp.float32
  # float32 rounds the argument, of up to 16 * 15, by 1.5e-5; the value moves by that relative amount.
  np.testing.assert_allclose(g, expected_gate(a, dt_bias, lower_bound), rtol=5e-5, atol=1e-30)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_low_precision_input_is_widened_before_any_arithmetic(lower_bound):
  a, dt_bias = gate_inputs()
  a_low = a.astype(jnp.bfloat16)
  g = decay_gate(a_low, A_LOG, dt_bias, lower_bound=lower_bound)
  np.testing.assert_array_equal(g, decay_gate(a_low.astype(jnp.float32), A_LOG, dt_bias, lower_bound=lower_bound))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_input_gives_finite_decay_that_is_never_positive_and_finite_gradients(lower_bound):
  _, dt_bias = gate_inputs()
  a = jnp.broadcast_to(jnp.array([-1e4, -50.0, 0.0, 50.0, 1e4])[None, :, None, None], (1, 5, HEADS, KEY_DIM))
  g = decay_gate(a, A_LOG, dt_bias, lower_bound=lower_bound)
  assert np.all(np.isfinite(g))
  assert np.all(g <= 0)
  assert np.all(g[:, 0] == 0)
  if lower_bound is not None:
    assert np.all(g >= lower_bound)
  grads = jax.grad(lambda *args: decay_gate(*args, lower_bound=lower_bound).sum(), argnums=(0, 1, 2))(a, A_LOG, dt_bias)
  assert all(np.all(np.isfinite(x)) for x in grads)


@pytest.mark.parametrize("lower_bound", [0.0, 5.0, float("nan")])
def test_bound_that_is_not_negative_is_refused(lower_bound):
  a, dt_bias = gate_inputs()
  with pytest.raises(InputError, match=r"gate_lower_bound is .*, expected a negative log decay"):
    decay_gate(a, A_LOG, dt_bias, lower_bound=lower_bound)
