from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import rms_norm, softmax
from kimi_k3.attn_res import AttentionResidual, attention_residual, push_snapshot

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]

EPS = 1e-5
BATCH, TOKENS, HIDDEN, SLOTS = 2, 3, 16, 4
TOLERANCE = 1e-5  # of the largest value


@pytest.fixture(scope="module")
def case():
  """Prefix, snapshots and query; the candidates differ in size by a factor of a hundred."""
  rng = np.random.default_rng(0)
  prefix = rng.standard_normal((BATCH, TOKENS, HIDDEN))
  snapshots = rng.standard_normal((SLOTS, BATCH, TOKENS, HIDDEN)) * np.array([0.1, 1.0, 10.0, 3.0])[:, None, None, None]
  return tuple(jnp.asarray(a, jnp.float32) for a in (prefix, snapshots, rng.standard_normal(HIDDEN)))


def float64_mix(prefix, snapshots, query):
  values = np.concatenate([snapshots, prefix[None]]).astype(np.float64)
  weights = softmax(rms_norm(values, 1.0, EPS) @ np.asarray(query, np.float64), axis=0)
  return np.sum(weights[..., None] * values, axis=0)


def assert_near(found, expected):
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def traced(prefix, snapshots, count, query):
  return jax.jit(lambda c: attention_residual(prefix, snapshots, c, query, EPS))(count)


@pytest.mark.parametrize("count", range(SLOTS + 1))
def test_the_first_snapshots_and_the_prefix_are_mixed(case, count):
  prefix, snapshots, query = case
  expected = float64_mix(np.asarray(prefix), np.asarray(snapshots)[:count], query)
  assert_near(attention_residual(prefix, snapshots, count, query, EPS), expected)
  assert_near(traced(prefix, snapshots, count, query), expected)


def test_values_are_the_candidates_and_not_their_keys():
  # A query of zeros weighs all alike, and 10 * [1, -1] and [1, -1] have the same key.
  prefix, snapshots = jnp.array([[[1.0, -1.0]]]), jnp.array([[[[10.0, -10.0]]]])
  np.testing.assert_allclose(
    attention_residual(prefix, snapshots, 1, jnp.zeros(2), EPS), [[[5.5, -5.5]]], rtol=TOLERANCE
  )


def test_the_prefix_alone_is_left_as_it_is(case):
  prefix, snapshots, query = case
  np.testing.assert_array_equal(attention_residual(prefix, snapshots, 0, query, EPS), prefix)
  np.testing.assert_allclose(traced(prefix, snapshots, 0, query), prefix, rtol=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_stands_in_free_slots_does_not_matter(case, garbage):
  prefix, snapshots, query = case
  dirty = snapshots.at[2:].set(garbage)
  for mix in (traced, lambda p, s, c, q: attention_residual(p, s, c, q, EPS)):
    np.testing.assert_array_equal(mix(prefix, dirty, 2, query), mix(prefix, snapshots, 2, query))


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_in_one_token_stays_in_that_token(case, garbage):
  """A pad's or a row's: each token mixes the snapshots of its own stream alone."""
  prefix, snapshots, query = case
  hit = jnp.zeros((BATCH, TOKENS, 1), bool).at[0, 1].set(True)
  dirty_prefix, dirty_snapshots = jnp.where(hit, garbage, prefix), jnp.where(hit[None], garbage, snapshots)
  for mix in (traced, lambda p, s, c, q: attention_residual(p, s, c, q, EPS)):
    found, clean = mix(dirty_prefix, dirty_snapshots, SLOTS, query), mix(prefix, snapshots, SLOTS, query)
    np.testing.assert_array_equal(np.where(hit, 0, found), np.where(hit, 0, clean))
    assert np.isnan(found[0, 1]).any()


def test_each_token_is_mixed_as_if_it_were_alone(case):
  prefix, snapshots, query = case
  whole = attention_residual(prefix, snapshots, SLOTS, query, EPS)
  for row, t in np.ndindex(BATCH, TOKENS):
    at = np.s_[row : row + 1, t : t + 1]
    alone = attention_residual(prefix[at], snapshots[:, *at], SLOTS, query, EPS)
    np.testing.assert_allclose(alone, whole[at], rtol=0, atol=1e-6 * np.abs(whole).max())
  permuted = attention_residual(prefix[::-1], snapshots[:, ::-1], SLOTS, query, EPS)
  np.testing.assert_array_equal(permuted, whole[::-1])


def test_large_scores_do_not_overflow(case):
  prefix, snapshots, query = case
  found = traced(prefix, snapshots, SLOTS, 1e3 * query)
  assert_near(found, float64_mix(np.asarray(prefix), np.asarray(snapshots), 1e3 * query))


def test_bfloat16_candidates_are_mixed_in_float32(case):
  prefix, snapshots, query = case
  prefix, snapshots = prefix.astype(jnp.bfloat16), snapshots.astype(jnp.bfloat16)
  found = attention_residual(prefix, snapshots, SLOTS, query, EPS)
  assert found.dtype == jnp.bfloat16
  wide = attention_residual(prefix.astype(jnp.float32), snapshots.astype(jnp.float32), SLOTS, query, EPS)
  np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("count", [1, SLOTS])
def test_gradients_are_finite_and_nothing_flows_into_free_slots(case, count):
  prefix, snapshots, query = case

  def loss(prefix, snapshots, query):
    return jnp.sum(attention_residual(prefix, snapshots, jnp.int32(count), query, EPS) ** 2)

  by_prefix, by_snapshots, by_query = jax.grad(loss, argnums=(0, 1, 2))(prefix, snapshots, query)
  for gradient in (by_prefix, by_snapshots[:count], by_query):
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0
  np.testing.assert_array_equal(by_snapshots[count:], 0.0)


def test_the_gradient_of_a_never_filled_buffer_is_finite(case):
  prefix, _, query = case
  empty = jnp.zeros((SLOTS, BATCH, TOKENS, HIDDEN))
  gradient = jax.grad(lambda s: jnp.sum(attention_residual(prefix, s, jnp.int32(0), query, EPS)))(empty)
  np.testing.assert_array_equal(gradient, 0.0)


def test_the_query_is_the_product_of_norm_and_proj(case, float32_compute):
  from flax import nnx

  prefix, snapshots, _ = case
  site = AttentionResidual(HIDDEN, eps=EPS, compute=float32_compute, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(1)
  site.norm[...], site.proj[...] = (jnp.asarray(rng.standard_normal(HIDDEN), jnp.float32) for _ in range(2))
  expected = float64_mix(np.asarray(prefix), np.asarray(snapshots), site.norm[...] * site.proj[...])
  assert_near(site(prefix, snapshots, SLOTS), expected)


@pytest.mark.parametrize("take", [True, False])
@pytest.mark.parametrize("slot", [0, 2])
def test_a_snapshot_goes_into_its_slot_if_it_is_taken(case, slot, take):
  prefix, snapshots, _ = case
  expected = np.array(snapshots)
  if take:
    expected[slot] = prefix
  np.testing.assert_array_equal(push_snapshot(snapshots, prefix, slot, take), expected)
  found = jax.jit(push_snapshot)(snapshots, prefix, jnp.int32(slot), jnp.bool_(take))
  np.testing.assert_array_equal(found, expected)


def test_a_slot_past_the_buffer_changes_nothing_when_no_snapshot_is_taken(case):
  prefix, snapshots, _ = case
  found = push_snapshot(snapshots, prefix, jnp.int32(SLOTS), jnp.bool_(False))
  np.testing.assert_array_equal(found, snapshots)
