from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_k3 import fp8_block_jax
from kimi_k3.convert import fp8_block

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def bits(array) -> np.ndarray:
  """The stored bits, so that -0.0 and 0.0 differ."""
  array = np.asarray(array)
  return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_under_the_extreme_scales_is_exact_bit_for_bit(dtype, jit):
  codes = np.tile(np.arange(256, dtype=np.uint8), (3 * 128, 1))
  codes[(codes & 0x7F) == 0x7F] = 0  # NaN, which the converter does not write
  codes[256:][(codes[256:] & 0x7F) > 0x77] = 0  # above 240, which overflows under the largest scale
  codes = codes.view(ml_dtypes.float8_e4m3fn)
  exponents = np.repeat([[-117], [-3], [120]], 2, axis=1)
  widen = functools.partial(fp8_block_jax.widen, dtype=dtype, num_in=1)
  found = (jax.jit(widen) if jit else widen)(jnp.asarray(codes), jnp.asarray(np.ldexp(np.float32(1), exponents)))
  exact = codes.astype(np.float64) * 2.0 ** np.repeat(exponents[:, :1], 128, axis=0)
  assert found.dtype == dtype
  np.testing.assert_array_equal(bits(found), bits(exact.astype(DTYPES[dtype])))


@pytest.mark.parametrize(("shape", "num_in"), [((300, 3, 50), 1), ((3, 50, 300), 2), ((2, 3, 70), 1), ((128, 256), 1)])
def test_the_axes_of_each_side_count_as_one(shape, num_in):
  rng = np.random.default_rng(0)
  codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
  matrix = codes.reshape(int(np.prod(shape[:num_in])), -1).astype(np.float32)
  scales = np.ldexp(np.float32(1), rng.integers(-9, 9, [-(-size // 128) for size in matrix.shape]))
  found = fp8_block_jax.widen(jnp.asarray(codes), jnp.asarray(scales), "float32", num_in=num_in)
  for i, j in np.ndindex(*matrix.shape):
    matrix[i, j] *= scales[i // 128, j // 128]
  np.testing.assert_array_equal(found, matrix.reshape(shape))


@pytest.mark.parametrize(
  ("shape", "num_in", "size"), [((130, 4, 40), 1, 1.0), ((4, 40, 130), 2, 1e-30), ((4, 40, 130), 2, 1e30)]
)
def test_random_weights_are_encoded_as_the_converter_would(shape, num_in, size):
  weights = (np.random.default_rng(0).standard_normal(shape) * size).astype(ml_dtypes.bfloat16)
  weights.reshape(-1)[:3] = 0
  codes, scales = fp8_block_jax.encode(jnp.asarray(weights), num_in=num_in)
  matrix = weights.reshape(int(np.prod(shape[:num_in])), -1)
  expected_codes, expected_scales = fp8_block.encode(np.ascontiguousarray(matrix.T), "w")
  np.testing.assert_array_equal(bits(codes), bits(expected_codes).T.reshape(shape))
  np.testing.assert_array_equal(scales, expected_scales.T)


def test_zeros_have_scale_1():
  codes, scales = fp8_block_jax.encode(jnp.zeros((3, 4)), num_in=1)
  assert scales.tolist() == [[1.0]]
  np.testing.assert_array_equal(bits(codes), np.zeros((3, 4), np.uint8))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_dtype_that_cannot_hold_every_value_is_refused(dtype):
  codes = jnp.zeros((2, 2), jnp.float8_e4m3fn)
  with pytest.raises(ValueError, match=f"float32 or bfloat16, not {dtype}"):
    fp8_block_jax.widen(codes, jnp.ones((1, 1)), dtype, num_in=1)
