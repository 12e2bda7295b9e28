"""Absorbed attention against what it absorbs: keys and values of every head, materialised in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import softmax
from kimi_k3.mla import CachedLatents, absorbed_attention

pytestmark = pytest.mark.strict_ranks

BATCH, HEADS, NOPE, TAIL, LATENT, VALUE = 3, 4, 16, 8, 24, 12
PREFILL, GENERATED = 7, 5
TOLERANCE = 1e-5  # of the largest value


@pytest.fixture(scope="module")
def case():
  """nope, tail, to_key, to_value, and one latent and tail for each of the PREFILL + GENERATED places."""
  rng = np.random.default_rng(0)
  shapes = (
    (BATCH, 1, HEADS, NOPE),
    (BATCH, 1, HEADS, TAIL),
    (LATENT, HEADS, NOPE),
    (LATENT, HEADS, VALUE),
    (BATCH, PREFILL + GENERATED, LATENT),
    (BATCH, PREFILL + GENERATED, TAIL),
  )
  return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


@pytest.fixture(scope="module")
def visible():
  """Rows of different lengths: padded prompts, and generated tokens so far."""
  lengths, steps = np.array([7, 3, 1]), np.array([1, 5, 2])
  prompt = np.arange(PREFILL) < lengths[:, None]
  return np.concatenate([prompt, np.arange(GENERATED) < steps[:, None]], axis=1)


def parts_of(latent, tail, visible, cuts) -> list[CachedLatents]:
  return [
    CachedLatents(latent[:, a:b], tail[:, a:b], jnp.asarray(visible[:, a:b]))
    for a, b in zip((0, *cuts), (*cuts, latent.shape[1]), strict=True)
  ]


def absorbed(case, visible, cuts=(PREFILL,)):
  nope, tail, to_key, to_value, latent, key_tail = case
  return absorbed_attention(
    nope, tail, to_key, to_value, parts_of(latent, key_tail, visible, cuts), precision="highest"
  )


def materialised(case, visible):
  """Softmax attention over keys [nope | tail] and values built from the latents, head by head."""
  nope, tail, to_key, to_value, latent, key_tail = (np.asarray(a, np.float64) for a in case)
  keys = np.einsum("bsc,chn->bshn", latent, to_key)
  keys = np.concatenate([keys, np.broadcast_to(key_tail[:, :, None], (*keys.shape[:3], TAIL))], axis=-1)
  values = np.einsum("bsc,chv->bshv", latent, to_value)
  scores = np.einsum("bthn,bshn->bhts", np.concatenate([nope, tail], axis=-1), keys)
  weights = softmax(np.where(visible[:, None, None], scores, -np.inf))
  return np.einsum("bhts,bshv->bthv", weights, values)


def assert_near(found, expected, tolerance=TOLERANCE):
  np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_absorbed_equals_materialised(case, visible):
  found = absorbed(case, visible)
  assert found.shape == (BATCH, 1, HEADS, VALUE)
  assert_near(found, materialised(case, visible))


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 8)])
def test_it_does_not_matter_how_the_cache_is_cut_into_parts(case, visible, cuts):
  assert_near(absorbed(case, visible, cuts), materialised(case, visible))


def test_a_part_nobody_may_see_has_no_say(case, visible):
  for hidden in (np.s_[:, :PREFILL], np.s_[:, PREFILL:]):
    masked = visible.copy()
    masked[hidden] = False
    assert_near(absorbed(case, masked), materialised(case, masked))


def test_one_visible_token_is_attended_to_alone(case, visible):
  masked = np.zeros_like(visible)
  masked[:, 4] = True
  _, _, _, to_value, latent, _ = case
  expected = np.einsum("bc,chv->bhv", latent[:, 4], to_value)[:, None]
  assert_near(absorbed(case, masked), expected)


def test_garbage_in_places_not_visible_does_not_matter_while_it_is_finite(case, visible):
  nope, tail, to_key, to_value, latent, key_tail = case
  hidden = jnp.asarray(~visible)[..., None]
  dirty = (nope, tail, to_key, to_value, jnp.where(hidden, 1e4, latent), jnp.where(hidden, -1e4, key_tail))
  np.testing.assert_array_equal(absorbed(dirty, visible), absorbed(case, visible))


def test_scores_far_beyond_the_range_of_exp_do_not_overflow(case, visible):
  nope, tail, *rest = case
  scaled = (50 * nope, 50 * tail, *rest)
  # Float32 leaves an error of 3e-4 in a score of 5000, and the weights are its exponential.
  assert_near(absorbed(scaled, visible), materialised(scaled, visible), 1e-3)


def rows_of(case, rows):
  nope, tail, to_key, to_value, latent, key_tail = case
  return nope[rows], tail[rows], to_key, to_value, latent[rows], key_tail[rows]


def test_rows_do_not_see_each_other(case, visible):
  found = absorbed(case, visible)
  for rows in ([2, 0, 1], [1]):
    # One row's products may be summed in another order.
    assert_near(absorbed(rows_of(case, np.array(rows)), visible[rows]), np.asarray(found)[rows], 1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_in_one_row_stays_in_that_row(case, visible, garbage):
  nope, tail, to_key, to_value, latent, key_tail = case
  nope, tail, latent, key_tail = (x.at[1].set(garbage) for x in (nope, tail, latent, key_tail))
  found = absorbed((nope, tail, to_key, to_value, latent, key_tail), visible)
  others = np.array([0, 2])
  np.testing.assert_array_equal(found[others], absorbed(case, visible)[others])
  assert np.isnan(found[1]).all()


def test_latents_that_come_after_a_row_change_nothing_before_they_are_visible(case, visible):
  """The places behind a row's own token hold what the slot's former row left there."""
  nope, tail, to_key, to_value, latent, key_tail = case
  before = absorbed(case, visible)
  behind = jnp.asarray(~visible)[..., None]
  former = (nope, tail, to_key, to_value, jnp.where(behind, latent[::-1], latent), jnp.where(behind, 3.0, key_tail))
  np.testing.assert_array_equal(absorbed(former, visible), before)


def test_a_row_that_sees_nothing_gets_zero(case, visible):
  masked = visible.copy()
  masked[1] = False
  found = absorbed(case, masked)
  np.testing.assert_array_equal(found[1], 0.0)
  others = np.array([0, 2])
  np.testing.assert_array_equal(found[others], absorbed(case, visible)[others])


def test_no_array_has_keys_or_values_of_every_cached_token(case, visible):
  program = jax.make_jaxpr(lambda *arrays: absorbed(arrays, visible))(*case)
  sizes = [v.aval.size for eqn in program.eqns for v in eqn.outvars]
  assert max(sizes) < BATCH * PREFILL * HEADS * VALUE
  joined = [eqn for eqn in program.eqns if eqn.primitive.name == "concatenate" and eqn.outvars[0].aval.ndim > 3]
  assert not joined, "the parts of the cache were joined"


def test_bfloat16_gives_bfloat16_close_to_float32(case, visible):
  found = absorbed(tuple(a.astype(jnp.bfloat16) for a in case), visible)
  assert found.dtype == jnp.bfloat16
  expected = materialised(case, visible)
  # Scores of a hundred or so, rounded inputs: 8 bits of each.
  np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0, atol=0.1 * np.abs(expected).max())
