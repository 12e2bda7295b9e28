from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3_reference import mxfp4_decode
from kimi_k3 import mxfp4_jax

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
LARGEST_SCALE = 252  # 253 and 254 overflow bfloat16, 255 is NaN: the converter refuses them


def bits(array) -> np.ndarray:
  """The stored bits, so that -0.0 and 0.0 differ."""
  array = np.asarray(array)
  return array.view(f"u{array.itemsize}")


@pytest.fixture(scope="module")
def every_byte() -> tuple[np.ndarray, np.ndarray]:
  """All 256 bytes under each scale byte: packed [253 * 16, 16], scale [253 * 16, 1]."""
  packed = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (LARGEST_SCALE + 1, 1))
  scale = np.repeat(np.arange(LARGEST_SCALE + 1, dtype=np.uint8), 16)[:, None]
  return packed, scale


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_under_every_scale_is_the_references_bit_for_bit(every_byte, dtype, jit):
  packed, scale = every_byte
  decode = functools.partial(mxfp4_jax.decode, dtype=dtype)
  found = (jax.jit(decode) if jit else decode)(jnp.asarray(packed), jnp.asarray(scale))
  expected = mxfp4_decode(packed, scale, DTYPES[dtype])
  assert np.isfinite(expected.astype(np.float64)).all()
  assert found.shape == (16 * (LARGEST_SCALE + 1), 32)
  np.testing.assert_array_equal(bits(found), bits(expected))


def test_the_exact_value_survives_in_both_dtypes(every_byte):
  packed, scale = every_byte
  exact = mxfp4_decode(packed, scale, np.float64)
  for dtype, held in DTYPES.items():
    found = np.asarray(mxfp4_jax.decode(jnp.asarray(packed), jnp.asarray(scale), dtype))
    assert found.dtype == held
    np.testing.assert_array_equal(found.astype(np.float64), exact)


def test_one_group_by_hand():
  # Codes 0 to 15 twice, low nibble first; scale 128 doubles.
  packed = jnp.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, jnp.uint8)
  found = mxfp4_jax.decode(packed, jnp.array([128], jnp.uint8), "float32")
  values = [0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12]
  np.testing.assert_array_equal(bits(found), bits(np.float32(values * 2)))


def test_each_group_of_32_has_its_own_scale():
  packed = jnp.full((2, 32), 0x22, jnp.uint8)  # ones
  scale = jnp.array([[127, 128], [126, 130]], jnp.uint8)
  expected = np.repeat([[1.0, 2.0], [0.5, 8.0]], 32, axis=1)
  np.testing.assert_array_equal(mxfp4_jax.decode(packed, scale, "bfloat16").astype("float32"), expected)


def test_leading_axes_are_kept():
  rng = np.random.default_rng(0)
  packed = rng.integers(0, 256, (3, 2, 5, 48), np.uint8)
  scale = rng.integers(100, 140, (3, 2, 5, 3), np.uint8)
  found = np.asarray(mxfp4_jax.decode(jnp.asarray(packed), jnp.asarray(scale), "float32"))
  expected = mxfp4_decode(packed.reshape(30, 48), scale.reshape(30, 3), np.float32).reshape(3, 2, 5, 96)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_dtype_that_cannot_hold_every_value_is_refused(dtype):
  packed, scale = jnp.zeros((1, 16), jnp.uint8), jnp.zeros((1, 1), jnp.uint8)
  with pytest.raises(ValueError, match=f"float32 or bfloat16, not {dtype}"):
    mxfp4_jax.decode(packed, scale, dtype)
