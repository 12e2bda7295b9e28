from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3_reference
from kimi_k3.activations import gated_activation, situ

pytestmark = pytest.mark.strict_ranks

BETA, LINEAR_BETA = 4.0, 25.0
TOLERANCE = 3e-6  # relative; two tanh, an exponential and five products in float32


@pytest.mark.parametrize(
  ("gate", "up", "expected"),
  [
    (0.0, 7.0, 0.0),
    (1.0, 1.0, 0.7158178),  # 4 tanh(1/4) sigmoid(1) 25 tanh(1/25)
    (-1.0, 1.0, -0.2633347),
    (2.0, -3.0, -4.8610666),
    (100.0, 1e6, 100.0),  # both bounds reached: 4 * 25
    (100.0, -1e6, -100.0),
    (-100.0, 1e6, 0.0),  # the sigmoid closes
  ],
)
def test_situ_by_hand(gate, up, expected):
  found = situ(jnp.float32(gate), jnp.float32(up), beta=BETA, linear_beta=LINEAR_BETA)
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_situ_without_the_second_bound_is_linear_in_up():
  one, thousand = (situ(jnp.float32(2.0), jnp.float32(up), beta=BETA, linear_beta=None) for up in (1.0, 1e3))
  np.testing.assert_allclose(thousand, 1e3 * one, rtol=TOLERANCE)
  np.testing.assert_allclose(one, 4 * np.tanh(0.5) / (1 + np.exp(-2.0)), rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["k3_config", "kimi_linear_config"])
def test_the_configs_activation_is_the_references(name, request):
  config = request.getfixturevalue(name)
  keys = ("hidden_act", "activation_situ_beta", "activation_situ_linear_beta")
  released = dict(zip(keys, (config.hidden_act, config.situ_beta, config.situ_linear_beta), strict=True))
  gate, up = np.meshgrid(np.linspace(-20, 20, 81), np.linspace(-60, 60, 61))
  gate, up = np.float32(gate), np.float32(up)
  expected = k3_reference.gated_activation(released, gate.astype(np.float64), up.astype(np.float64))
  found = gated_activation(config, jnp.asarray(gate), jnp.asarray(up))
  np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=1e-12)


@pytest.mark.parametrize("name", ["k3_config", "kimi_linear_config"])
def test_bfloat16_branches_are_multiplied_in_float32(name, request):
  config = request.getfixturevalue(name)
  gate, up = jnp.array([0.7, -1.3], jnp.bfloat16), jnp.array([2.1, 5.3], jnp.bfloat16)
  found = gated_activation(config, gate, up)
  assert found.dtype == jnp.float32
  np.testing.assert_array_equal(found, gated_activation(config, gate.astype(jnp.float32), up.astype(jnp.float32)))


def test_the_bounds_are_the_configs(k3_config):
  config = dataclasses.replace(k3_config, situ_beta=2.0, situ_linear_beta=3.0)
  np.testing.assert_allclose(gated_activation(config, jnp.float32(99.0), jnp.float32(99.0)), 6.0, rtol=TOLERANCE)


def test_gradients_are_finite_where_the_bounds_are_reached(k3_config):
  gate, up = jnp.array([-1e4, 0.0, 1e4]), jnp.array([1e4, 0.0, -1e4])
  for gradient in jax.grad(lambda g, u: gated_activation(k3_config, g, u).sum(), argnums=(0, 1))(gate, up):
    assert np.isfinite(gradient).all()
