"""The rule of the selection bias, and that it evens out the loads of a router that nothing else changes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from kimi_k3.moe.router import BIAS_GRADIENT_SCALE, Router
from kimi_k3.training.bias import selection_bias_update

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]


def step(bias, gradient, rate: float):
  rule = selection_bias_update(rate)
  updates, _ = rule.update({"bias": gradient}, rule.init({"bias": bias}))
  return optax.apply_updates({"bias": bias}, updates)["bias"]


def test_experts_with_too_many_tokens_go_down_and_the_others_up_around_a_mean_of_zero():
  excess = jnp.array([5.0, -1.0, -1.0, -3.0])
  # The signs of e are -1, 1, 1, 1, their mean is 0.5.
  moved = step(jnp.array([0.25, 0.0, 0.0, 0.5]), BIAS_GRADIENT_SCALE * excess, 0.1)
  np.testing.assert_allclose(moved, [0.25 - 0.15, 0.05, 0.05, 0.5 + 0.05], rtol=1e-6)


def test_an_expert_with_the_mean_load_has_sign_zero_and_balanced_experts_stay():
  np.testing.assert_allclose(step(jnp.zeros(3), jnp.array([1e-30, 0.0, -1e-30]), 0.1), [-0.1, 0.0, 0.1], rtol=1e-6)
  np.testing.assert_array_equal(step(jnp.ones(3), jnp.zeros(3), 0.1), np.ones(3, np.float32))


def test_each_layer_of_a_stack_has_its_own_mean():
  gradient = jnp.array([[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, -1.0, -1.0]])
  moved = step(jnp.zeros((2, 4)), gradient, 1.0)
  np.testing.assert_array_equal(moved, np.float32([[-1.5, 0.5, 0.5, 0.5], [-1, -1, 1, 1]]))


def test_gradients_in_bfloat16_move_a_float32_bias_by_the_whole_step():
  gradient = (BIAS_GRADIENT_SCALE * jnp.array([1.0, -1.0])).astype(jnp.bfloat16)
  moved = step(jnp.array([0.5, 0.5]), gradient, 1e-3)
  np.testing.assert_allclose(moved, [0.499, 0.501], rtol=1e-6)


def test_a_skewed_router_is_balanced_after_some_steps(k3_config, float32_compute):
  """Half of the experts score higher for every token; afterwards no load is twice the mean."""
  config = dataclasses.replace(k3_config, num_experts_per_token=2)
  router = Router(config, float32_compute, nnx.Rngs(0))
  direction = jax.random.normal(jax.random.key(0), (config.hidden_size,))
  favour = jnp.where(jnp.arange(config.num_experts) < config.num_experts // 2, 0.05, -0.05)
  router.kernel[...] += direction[:, None] * favour[None, :]
  x = jax.random.normal(jax.random.key(1), (512, config.hidden_size)) + 0.5 * direction[None, :]
  graph, params = nnx.split(router)

  @jax.jit
  def gradient(params):
    return jax.grad(lambda p: jnp.sum(nnx.merge(graph, p)(x)[1]))(params)["bias"][...]

  def busiest(params):
    ids, _ = nnx.merge(graph, params)(x)
    return np.bincount(np.asarray(ids).ravel(), minlength=config.num_experts).max() / (ids.size / config.num_experts)

  assert busiest(params) > 3
  for _ in range(100):
    params["bias"][...] = step(params["bias"][...], gradient(params), 0.01)
  assert busiest(params) < 1.5
