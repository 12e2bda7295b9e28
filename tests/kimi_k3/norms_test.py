from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import rms_norm, sigmoid
from kimi_k3.norms import RMSNorm, gated_head_norm, rms_scale

pytestmark = [pytest.mark.strict_ranks, pytest.mark.usefixtures("unsharded")]

EPS = 1e-5
TOLERANCE = 2e-6  # a sum of 32 squares, a root and two products in float32


def norm_of(scale, eps: float = EPS) -> RMSNorm:
  norm = RMSNorm(len(scale), eps=eps, dtype=jnp.asarray(scale).dtype, axes=("norm",))
  norm.scale[...] = jnp.asarray(scale)
  return norm


def test_root_mean_square_by_hand():
  # The mean square of 3, 4, 0, 0 is 6.25; no eps, so that the numbers are round.
  np.testing.assert_allclose(rms_scale(jnp.array([3.0, 4.0, 0.0, 0.0]), 0.0), [1.2, 1.6, 0.0, 0.0], rtol=1e-7)


@pytest.mark.parametrize(("eps", "first"), [(1e-5, 1e-3 / np.sqrt(1.1e-5)), (1e-6, 1e-3 / np.sqrt(2e-6))])
def test_eps_is_added_to_the_mean_square_and_decides_for_small_inputs(eps, first):
  np.testing.assert_allclose(rms_scale(jnp.full(8, 1e-3), eps), np.full(8, first), rtol=TOLERANCE)


def test_norm_is_the_references():
  rng = np.random.default_rng(0)
  x, scale = rng.standard_normal((3, 5, 32)) * [[[0.01]], [[1.0]], [[100.0]]], rng.standard_normal(32)
  found = norm_of(jnp.asarray(scale, jnp.float32))(jnp.asarray(x, jnp.float32))
  np.testing.assert_allclose(found, rms_norm(x, scale, EPS), rtol=1e-5)


def test_normalised_values_are_rounded_before_they_are_scaled():
  x, scale = (jnp.asarray(a, jnp.bfloat16) for a in 1.4 * np.random.default_rng(2).standard_normal((2, 256)))
  normalised, factors = np.asarray(rms_scale(x, EPS)), np.asarray(scale, np.float32)
  rounded = normalised.astype(jnp.bfloat16).astype(np.float32)
  expected, scaled_first = (np.asarray(v * factors).astype(jnp.bfloat16) for v in (rounded, normalised))
  assert (expected != scaled_first).mean() > 0.1  # the case tells the two orders apart
  np.testing.assert_array_equal(norm_of(scale)(x), expected)


def test_the_mean_of_bfloat16_inputs_is_taken_in_float32():
  # A bfloat16 sum of 4096 ones would stop at 256.
  np.testing.assert_array_equal(norm_of(jnp.ones(4096, jnp.bfloat16), 0.0)(jnp.ones(4096, jnp.bfloat16)), 1.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_result_has_the_inputs_dtype_whatever_the_scales(dtype):
  assert norm_of(jnp.ones(4, jnp.float32))(jnp.ones((2, 4), dtype)).dtype == dtype


def test_the_gate_multiplies_each_head_after_its_own_norm():
  rng = np.random.default_rng(1)
  o, z, scale = rng.standard_normal((2, 3, 4, 16)), rng.standard_normal((2, 3, 4, 16)), rng.standard_normal(16)
  o[:, :, 0] *= 100.0  # a loud head must not quieten the others
  found = gated_head_norm(*(jnp.asarray(a, jnp.float32) for a in (o, z, scale)), EPS)
  np.testing.assert_allclose(found, rms_norm(o, scale, EPS) * sigmoid(z), rtol=1e-5)


def test_the_gate_is_computed_in_float32_on_bfloat16_inputs():
  o, z = jnp.full((1, 4), 3.0, jnp.bfloat16), jnp.full((1, 4), 0.3, jnp.bfloat16)
  found = gated_head_norm(o, z, jnp.ones(4, jnp.bfloat16), 0.0)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, np.full((1, 4), sigmoid(np.float64(z[0, 0]))), rtol=TOLERANCE)
