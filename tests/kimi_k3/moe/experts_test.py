"""The portable experts against a loop over tokens, and what no program of theirs may hold."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import k3_reference
from kimi_k3.convert import fp8_block
from kimi_k3.moe.experts import Experts, apply_experts

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]

TOLERANCE = 1e-5  # of the largest value; sums of tens of products in float32
TILE = 128
FORMS = ("packed", "bf16", "fp8")


def choices(rng: np.random.Generator, rows: int, num_experts: int, num_selected: int) -> np.ndarray:
  """Different experts for each row."""
  return np.array([rng.permutation(num_experts)[:num_selected] for _ in range(rows)])


def assert_near(found, expected):
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@functools.partial(jax.jit, static_argnums=3)
def times_expert_number(x, ids, weights, num_experts):
  """Experts that are easy to tell apart: number e multiplies by e + 1."""
  return apply_experts(x, ids, weights, num_experts, lambda e, rows: rows * (e + 1).astype(rows.dtype))


def expected_products(x, ids, weights):
  return x * np.sum(weights * (ids + 1), axis=1, keepdims=True)


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300])
def test_each_token_gets_the_weighted_sum_of_its_experts(rows):
  rng = np.random.default_rng(rows)
  x, weights = rng.standard_normal((rows, 8)), rng.random((rows, 3))
  ids = choices(rng, rows, 5, 3)
  found = times_expert_number(jnp.asarray(x, jnp.float32), jnp.asarray(ids), jnp.asarray(weights, jnp.float32), 5)
  assert found.dtype == jnp.float32
  assert_near(found, expected_products(x, ids, weights))


@pytest.mark.parametrize("rows", [1, 5, TILE, 3 * TILE + 7])
@pytest.mark.parametrize("expert", [0, 3, 6])
def test_one_expert_can_get_every_row_and_the_others_none(rows, expert):
  x = np.random.default_rng(0).standard_normal((rows, 8))
  ids, weights = np.full((rows, 1), expert), np.full((rows, 1), 0.5)
  found = times_expert_number(jnp.asarray(x, jnp.float32), jnp.asarray(ids), jnp.asarray(weights, jnp.float32), 7)
  assert_near(found, x * 0.5 * (expert + 1))


def test_an_expert_is_called_once_for_each_tile_of_its_rows():
  counts = {}

  def count(e, rows):
    assert rows.shape == (TILE, 4)
    jax.debug.callback(lambda e: counts.update({int(e): counts.get(int(e), 0) + 1}), e)
    return rows

  ids = jnp.array([0] * 129 + [2] * 128 + [5])[:, None]  # experts 1, 3 and 4 get nothing
  apply_experts(jnp.ones((258, 4)), ids, jnp.ones((258, 1)), 6, count).block_until_ready()
  jax.effects_barrier()
  assert counts == {0: 2, 2: 1, 5: 1}


def test_a_nan_in_one_token_stays_in_that_token():
  x = jnp.ones((4, 8)).at[1].set(jnp.nan)
  found = times_expert_number(x, jnp.array([[0, 1]] * 4), jnp.ones((4, 2)), 3)
  np.testing.assert_array_equal(jnp.isnan(found).any(axis=1), [False, True, False, False])


def test_outputs_of_experts_are_summed_before_they_are_rounded():
  # A bfloat16 holds 8 bits: 1 + 2^-12 would be 1.
  x, ids, weights = jnp.ones((2, 4), jnp.bfloat16), jnp.array([[0, 1], [2, 0]]), jnp.full((2, 2), 0.5)
  found = apply_experts(x, ids, weights, 3, lambda _, rows: jnp.full(rows.shape, 1 + 2.0**-12))
  np.testing.assert_array_equal(found, np.full((2, 4), 1 + 2.0**-12, np.float32))


@pytest.fixture(scope="module")
def ckpt(k3_tiny):
  return k3_reference.load_checkpoint(k3_tiny.checkpoint)


def test_the_scales_of_fp8_experts_are_cut_by_experts_only(k3_config, float32_compute):
  experts = nnx.eval_shape(lambda: Experts(stored_as(k3_config, "fp8"), float32_compute, nnx.Rngs(0)))
  assert experts.w1.get_metadata("out_sharding") == ("exp", "embed_moe", "mlp_moe")
  for w in ("w1", "w2", "w3"):
    assert getattr(experts, f"{w}_scale_inv").get_metadata("out_sharding") == ("exp", None, None)
    assert getattr(experts, f"{w}_scale_inv").shape == (k3_config.num_experts, 1, 1)


LAYER = "model.layers.5.block_sparse_moe.experts"


def stack(ckpt, config, name: str) -> np.ndarray:
  """One stored tensor of every expert."""
  return np.stack([ckpt.tensors[f"{LAYER}.{e}.{name}"] for e in range(config.num_experts)])


def stored_as(config, form: str):
  """The config with its experts packed, in FP8 or in bfloat16."""
  packed, fp8 = (("experts",) if form == name else () for name in ("packed", "fp8"))
  return dataclasses.replace(config, packed_modules=packed, fp8_modules=fp8)


def experts_of(ckpt, config, compute, *, form: str) -> Experts:
  """The experts of one layer of the golden checkpoint, as stored, decoded, or in FP8, which holds them exactly."""
  config = stored_as(config, form)
  with nnx.use_eager_sharding(False):
    experts = Experts(config, compute, nnx.Rngs(0))
  for w in ("w1", "w2", "w3"):
    if form == "packed":
      for part in ("packed", "scale"):
        getattr(experts, f"{w}_{part}")[...] = jnp.asarray(stack(ckpt, config, f"{w}.weight_{part}"))
      continue
    weights = np.stack([ckpt.weight(f"{LAYER}.{e}.{w}.weight").T for e in range(config.num_experts)])
    if form == "fp8":
      codes, scales = zip(*(fp8_block.encode(v.astype(ml_dtypes.bfloat16), w) for v in weights), strict=True)
      getattr(experts, w)[...] = jnp.asarray(np.stack(codes))
      getattr(experts, f"{w}_scale_inv")[...] = jnp.asarray(np.stack(scales))
    else:
      getattr(experts, w)[...] = jnp.asarray(weights, compute.weight_dtype)
  return experts


def loop(ckpt, x, ids, weights):
  """Every token and every chosen expert by itself, in float64."""
  y = np.zeros_like(x)
  for t, s in np.ndindex(*ids.shape):
    expert = f"{LAYER}.{ids[t, s]}"
    hidden = k3_reference.gated_activation(
      ckpt.config, ckpt.linear(f"{expert}.w1", x[t]), ckpt.linear(f"{expert}.w3", x[t])
    )
    y[t] += weights[t, s] * ckpt.linear(f"{expert}.w2", hidden)
  return y


@pytest.mark.parametrize(("rows", "form"), [*itertools.product((1, 7, 300), ("packed", "bf16")), (300, "fp8")])
def test_experts_equal_a_loop_over_tokens(ckpt, k3_config, float32_compute, rows, form):
  compute = dataclasses.replace(float32_compute, weight_dtype=jnp.bfloat16)
  rng = np.random.default_rng(rows)
  x, weights = rng.standard_normal((rows, k3_config.expert_dim)), rng.random((rows, 4))
  x = np.float32(x).astype(np.float64)
  ids = choices(rng, rows, k3_config.num_experts, 4)
  experts = experts_of(ckpt, k3_config, compute, form=form)
  found = jax.jit(experts.__call__)(jnp.asarray(x, jnp.float32), jnp.asarray(ids), jnp.asarray(weights, jnp.float32))
  assert_near(found, loop(ckpt, x, ids, weights))


def test_packed_decoded_and_fp8_experts_agree_to_the_bit(ckpt, k3_config, float32_compute):
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((9, k3_config.expert_dim)), jnp.bfloat16)
  ids, weights = jnp.asarray(choices(rng, 9, k3_config.num_experts, 4)), jnp.full((9, 4), 0.25)
  packed, decoded, fp8 = (experts_of(ckpt, k3_config, compute, form=f)(x, ids, weights) for f in FORMS)
  assert packed.dtype == decoded.dtype == fp8.dtype == jnp.float32
  np.testing.assert_array_equal(packed, decoded)
  np.testing.assert_array_equal(packed, fp8)


def inner_jaxprs(jaxpr):
  """The program and all programs inside it."""
  yield jaxpr
  for eqn in jaxpr.eqns:
    for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from inner_jaxprs(inner)


@pytest.mark.parametrize(
  ("rows", "form"),
  [*itertools.product((64, 1024), ("packed", "bf16")), (64, "fp8"), pytest.param(1024, "fp8", marks=pytest.mark.slow)],
)
def test_nothing_is_as_large_as_all_experts_decoded_or_as_tokens_times_experts(k3_config, float32_compute, rows, form):
  """In the traced program, and in what the compiler makes of it, at sizes where the three cannot be confused."""
  num_experts, latent, mlp = 64, 128, 192
  config = dataclasses.replace(
    stored_as(k3_config, form), num_experts=num_experts, expert_latent_dim=latent, expert_mlp_dim=mlp
  )
  compute = dataclasses.replace(float32_compute, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
  graph, abstract = nnx.split(nnx.eval_shape(lambda: Experts(config, compute, nnx.Rngs(0))))
  inputs = (
    jax.ShapeDtypeStruct((rows, latent), jnp.bfloat16),
    jax.ShapeDtypeStruct((rows, 4), jnp.int32),
    jax.ShapeDtypeStruct((rows, 4), jnp.float32),
  )

  def run(state, *arrays):
    return nnx.merge(graph, state)(*arrays)

  traced = jax.jit(run).trace(abstract, *inputs)
  eqns = [e for p in inner_jaxprs(traced.jaxpr.jaxpr) for e in p.eqns]
  # A barrier's output is its input; were it not, the compiler's temporaries would show it.
  made = [v for e in eqns if e.primitive.name != "optimization_barrier" for v in e.outvars]
  sizes = [v.aval.size for v in made if v.aval.shape]
  # One expert's matrix as codes, or scales of its whole FP8 blocks, or the rows of all tokens in float32; far from the
  # stack of all experts.
  allowed = max(latent * (256 if form == "fp8" else mlp), rows * latent)
  assert allowed < min(num_experts * latent * mlp, rows * num_experts * latent) / 2
  passed_through = (
    num_experts * latent * (mlp // 2 if form == "packed" else mlp)
  )  # weights that enter the loop as they are
  assert max(sizes) <= allowed
  # The compiler's own temporaries, weights not counted.
  temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
  assert temporary < passed_through
