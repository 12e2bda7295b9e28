from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3_reference
from kimi_k3.moe.router import BIAS_GRADIENT_SCALE, Router, route, with_load_gradient

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]


def route_one(scores, bias, **options):
  """Ids and weights of one token, as lists."""
  defaults = {"num_selected": 2, "renormalize": False, "scaling": 1.0}
  ids, weights = route(jnp.array([scores]), jnp.array(bias), **defaults | options)
  return ids[0].tolist(), weights[0].tolist()


def near(*values: float):
  return pytest.approx(list(values), rel=1e-6)


def test_the_bias_decides_who_is_chosen_but_not_how_much_he_counts():
  ids, weights = route_one([0.9, 0.5, 0.4, 0.1], [-0.7, 0.0, 0.0, 0.6])
  # Selection scores 0.2, 0.5, 0.4, 0.7: the lowest score wins, and counts 0.1.
  assert ids == [3, 1]
  assert weights == near(0.1, 0.5)


def test_weights_are_divided_by_their_sum_and_then_scaled():
  _, weights = route_one([0.3, 0.1, 0.2], [0.0, 0.0, 0.0], renormalize=True, scaling=2.5)
  assert weights == near(2.5 * 0.3 / 0.5, 2.5 * 0.2 / 0.5)


def test_weights_are_scaled_without_a_division_too():
  assert route_one([0.3, 0.1, 0.2], [0.0, 0.0, 0.0], scaling=2.5)[1] == near(0.75, 0.5)


def test_a_single_expert_keeps_its_score():
  ids, weights = route_one([0.3, 0.6, 0.2], [0.0, 0.0, 0.0], num_selected=1, renormalize=True, scaling=2.0)
  assert ids == [1]
  assert weights == near(1.2)


def test_all_experts_can_be_chosen():
  ids, weights = route_one([0.1, 0.3], [0.0, 0.0], renormalize=True)
  assert ids == [1, 0]
  assert weights == near(0.75, 0.25)


def test_equal_selection_scores_go_to_the_lowest_ids():
  assert route_one([0.5] * 6, [0.0, 0.0, 0.1, 0.0, 0.1, 0.1], num_selected=4)[0] == [2, 4, 5, 0]


def test_biases_that_bfloat16_cannot_tell_apart_decide(k3_config, float32_compute):
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  router = Router(dataclasses.replace(k3_config, num_experts_per_token=1), compute, nnx.Rngs(0))
  router.kernel[...] = jnp.zeros_like(router.kernel[...])  # every score is 0.5
  bias = jnp.zeros(k3_config.num_experts).at[7].set(2.0).at[11].set(2.0 + 2**-10)
  assert bias.astype(jnp.bfloat16)[7] == bias.astype(jnp.bfloat16)[11]
  router.bias[...] = bias
  ids, weights = router(jnp.ones((3, k3_config.hidden_size), jnp.bfloat16))
  assert ids.tolist() == [[11]] * 3
  assert weights.tolist() == [[0.5]] * 3


def test_scores_that_vanish_give_no_nan():
  assert route_one([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], renormalize=True)[1] == [0.0, 0.0]


def test_chosen_experts_come_best_first():
  rng = np.random.default_rng(0)
  scores, bias = rng.random((50, 16)), rng.standard_normal(16)
  ids, _ = route(
    jnp.asarray(scores, jnp.float32), jnp.asarray(bias, jnp.float32), num_selected=4, renormalize=True, scaling=1.0
  )
  np.testing.assert_array_equal(ids, np.argsort(-(scores + bias), axis=-1)[:, :4])


@pytest.fixture(scope="module")
def ckpt(k3_tiny):
  return k3_reference.load_checkpoint(k3_tiny.checkpoint)


def router_of(ckpt, config, compute, name) -> Router:
  router = Router(config, compute, nnx.Rngs(0))
  router.kernel[...] = jnp.asarray(ckpt.weight(f"{name}.gate.weight").T, router.kernel[...].dtype)
  router.bias[...] = jnp.asarray(ckpt.weight(f"{name}.gate.e_score_correction_bias"), router.bias[...].dtype)
  return router


@pytest.mark.parametrize("scaling", [1.0, 2.446])
def test_the_routers_choices_and_weights_are_the_references(ckpt, k3_config, float32_compute, scaling):
  name = "model.layers.5.block_sparse_moe"
  config = dataclasses.replace(k3_config, routed_scaling_factor=scaling)
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  x = jnp.asarray(np.random.default_rng(1).standard_normal((200, config.hidden_size)), jnp.bfloat16)
  changed = k3_reference.Checkpoint(ckpt.config | {"routed_scaling_factor": scaling}, ckpt.tensors)
  expected_ids, expected_weights, margin = k3_reference.route(changed, name, np.asarray(x, np.float64)[None])
  ids, weights = router_of(ckpt, config, compute, name)(x)
  assert weights.dtype == jnp.float32
  clear = margin[0] > 1e-5  # float32 noise of the scores is 1e-6
  assert clear.mean() > 0.95
  np.testing.assert_array_equal(np.asarray(ids)[clear], expected_ids[0][clear])
  np.testing.assert_allclose(np.asarray(weights)[clear], expected_weights[0][clear], rtol=1e-5)


def test_scores_are_float32_at_the_highest_precision_whatever_the_compute_dtype(k3_config, float32_compute):
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16, precision="default")
  router = Router(k3_config, compute, nnx.Rngs(0))
  x = jnp.ones((3, k3_config.hidden_size), jnp.bfloat16)
  (dot,) = (e for e in jax.make_jaxpr(router.__call__)(x).eqns if e.primitive.name == "dot_general")
  assert all(v.aval.dtype == jnp.float32 for v in (*dot.invars, *dot.outvars))
  assert set(dot.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize(("config", "dtype"), [("k3_config", jnp.float32), ("kimi_linear_config", jnp.bfloat16)])
def test_the_bias_is_stored_as_the_checkpoint_stores_it(config, dtype, request, float32_compute):
  compute = dataclasses.replace(float32_compute, weight_dtype=jnp.bfloat16)
  router = Router(request.getfixturevalue(config), compute, nnx.Rngs(0))
  assert (router.kernel[...].dtype, router.bias[...].dtype) == (jnp.bfloat16, dtype)


def bias_gradient(router: Router, x, valid=None, loss=jnp.sum):
  """The gradient of the bias, whatever the loss of the weights."""
  graph, params = nnx.split(router, nnx.Param)
  return jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p)(x, valid)[1])))(params)["bias"][...]


def loads(router: Router, x) -> np.ndarray:
  return np.bincount(np.asarray(router(x)[0]).ravel(), minlength=router.config.num_experts)


def make_router(config, compute) -> Router:
  router = Router(config, compute, nnx.Rngs(0))
  router.bias[...] = jax.random.normal(jax.random.key(0), router.bias[...].shape) * 0.1
  return router


def rows(config, count: int):
  return jax.random.normal(jax.random.key(1), (count, config.hidden_size))


def test_the_gradient_of_the_bias_is_each_experts_load_less_the_mean(k3_config, float32_compute):
  router, x = make_router(k3_config, float32_compute), rows(k3_config, 50)
  load = loads(router, x)
  expected = BIAS_GRADIENT_SCALE * (load - load.mean())
  assert np.any(expected)
  for loss in (lambda weights: 1e6 * jnp.sum(weights**2), lambda weights: 0 * jnp.sum(weights)):
    np.testing.assert_allclose(bias_gradient(router, x, loss=loss), expected, rtol=1e-6)


def test_the_gradients_of_the_scores_are_those_without_it():
  scores, bias = jax.random.uniform(jax.random.key(0), (20, 16)), jax.random.uniform(jax.random.key(1), (16,))
  options = {"num_selected": 4, "renormalize": True, "scaling": 2.0}

  def loss(scores, bias, with_it: bool):
    ids, weights = route(scores, bias, **options)
    weights = with_load_gradient(weights, bias, ids, None) if with_it else weights
    return jnp.sum(jnp.cos(weights * jnp.arange(4.0)[None, :])), weights

  (found, weights), (expected, plain) = (
    jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)(scores, bias, flag) for flag in (True, False)
  )
  np.testing.assert_array_equal(weights, plain)
  np.testing.assert_array_equal(found, expected)


def test_pads_count_in_no_load(k3_config, float32_compute):
  router, x = make_router(k3_config, float32_compute), rows(k3_config, 50)
  valid = jnp.arange(50) % 3 > 0
  found = bias_gradient(router, x, valid)
  np.testing.assert_allclose(found, bias_gradient(router, x[valid]), rtol=1e-6)
  assert np.any(found != bias_gradient(router, x))


def test_gradients_of_parts_of_a_batch_add_up_and_rematerialisation_changes_none(k3_config, float32_compute):
  router, x = make_router(k3_config, float32_compute), rows(k3_config, 64)
  parts = sum(bias_gradient(router, part) for part in (x[:10], x[10:]))
  whole = bias_gradient(router, x)
  np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6 * np.abs(whole).max())
  graph, params = nnx.split(router, nnx.Param)
  once_more = jax.checkpoint(lambda p: jnp.sum(nnx.merge(graph, p)(x)[1]))
  np.testing.assert_array_equal(jax.jit(jax.grad(once_more))(params)["bias"][...], whole)


def test_no_norm_of_gradients_sees_the_largest_load():
  """1e7 tokens that all choose one expert; and the load of one token in 1e7 is still no 0 after a mean of 100 parts."""
  largest, smallest = (jnp.float32(BIAS_GRADIENT_SCALE) * n for n in (1e7, 1e-3))
  assert jnp.square(largest) == 0
  assert smallest / 100 > jnp.finfo(jnp.float32).tiny
