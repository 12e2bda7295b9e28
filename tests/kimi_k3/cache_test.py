"""Rounding of latents: every number of FP8, every middle, what is too large, and what a compiler may not leave out."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_k3.cache import as_cached

pytestmark = pytest.mark.strict_ranks

FP8 = ml_dtypes.float8_e4m3fn


def numbers() -> np.ndarray:
  """Float32: all of FP8, the middles between neighbours, and the next float32 on both sides of each."""
  every = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
  every = np.sort(every[np.isfinite(every)])
  assert (every.size, every[0], every[-1]) == (254, -448, 448)
  middles = [(a + b) / 2 for a, b in itertools.pairwise(every)]
  points = np.concatenate([every, middles, [464, -464]]).astype(np.float32)
  return np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_number_becomes_the_nearest_of_fp8_ties_to_even(dtype):
  given = jnp.asarray(numbers(), dtype)
  found = np.asarray(jax.jit(lambda x: as_cached(x, FP8))(given))
  expected = np.asarray(given).astype(FP8)
  nan = np.isnan(expected.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
  np.testing.assert_array_equal(found.view(np.uint8)[~nan], expected.view(np.uint8)[~nan])


def test_what_is_larger_than_fp8_is_nan_and_not_the_largest():
  given = np.array([448, 464, -464, 464.5, -480, 1e9, np.inf, -np.inf, np.nan], np.float32)
  found = np.asarray(as_cached(jnp.asarray(given), FP8)).astype(np.float32)
  assert found[:3].tolist() == [448, 448, -448]
  assert np.isnan(found[3:]).all()


@pytest.mark.parametrize("narrow", [FP8, ml_dtypes.bfloat16])
def test_a_cast_back_does_not_undo_the_rounding(narrow):
  given = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)

  @jax.jit
  def there_and_back(x):
    return as_cached(x, narrow).astype(x.dtype) * 2

  np.testing.assert_array_equal(there_and_back(given), np.asarray(given).astype(narrow).astype(np.float32) * 2)
  assert "optimization_barrier" in there_and_back.lower(given).as_text()


def test_a_cache_of_the_same_dtype_takes_the_bits_as_they_are():
  given = jnp.asarray([1.0, jnp.nan, jnp.inf, 1e30], jnp.float32)
  assert as_cached(given, "float32") is given
