"""Block-wise FP8 in JAX: weight = code * scale, with one scale for each block of 128 inputs times 128 outputs.

The scales that `convert` writes are powers of two from 2**-117 to 2**120, so that each product is a normal number and
exact in bfloat16 and float32: no unit may round or flush one. convert/fp8_block.py is the same in numpy.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_k3.config import FP8_BLOCK

_LEAST_EXPONENT = -117  # of a scale: the smallest code, 2**-9, then gives 2**-126, the smallest normal number
# 448, the largest code, as mantissa * 2**exponent with a mantissa in [0.5, 1)
_LARGEST_MANTISSA, _LARGEST_EXPONENT = 0.875, 9


def widen(
  codes: Float[Array, "..."], scale_inv: Float[Array, "in_blocks out_blocks"], dtype, *, num_in: int
) -> Float[Array, "..."]:
  """Returns the weights that codes and scales stand for, in the shape of the codes.

  Args:
    codes: float8_e4m3fn [*in, *out].
    scale_inv: float32; the axes of each side count as one, in their order, and blocks at its end may be smaller.
    dtype: float32 or bfloat16.
    num_in: How many of the axes are inputs.
  """
  if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"block-wise FP8 widens to float32 or bfloat16, not {jnp.dtype(dtype)}")
  return codes.astype(dtype) * _spread(scale_inv.astype(dtype), codes.shape, num_in)


def encode(
  weights: Float[Array, "..."], *, num_in: int
) -> tuple[Float[Array, "..."], Float[Array, "in_blocks out_blocks"]]:
  """Returns codes and scales of random weights [*in, *out], by the rule of convert/fp8_block.py."""
  matrix = weights.astype(jnp.float32).reshape(math.prod(weights.shape[:num_in]), -1)
  padded = jnp.pad(jnp.abs(matrix), [(0, -size % FP8_BLOCK) for size in matrix.shape])
  rows, columns = padded.shape
  largest = jnp.max(padded.reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK), axis=(1, 3))
  mantissa, exponent = jnp.frexp(largest)
  exponent = jnp.maximum(exponent - _LARGEST_EXPONENT + (mantissa > _LARGEST_MANTISSA), _LEAST_EXPONENT)
  scale_inv = jnp.where(largest == 0, 1.0, jnp.ldexp(jnp.ones_like(largest), exponent))
  scaled = weights.astype(jnp.float32) / _spread(scale_inv, weights.shape, num_in)
  return scaled.astype(jnp.float8_e4m3fn), scale_inv


def _spread(scale_inv: Array, shape: tuple[int, ...], num_in: int) -> Array:
  """The scale of each weight."""
  inputs, outputs = math.prod(shape[:num_in]), math.prod(shape[num_in:])
  rows = jnp.repeat(scale_inv, FP8_BLOCK, axis=0)[:inputs]
  return jnp.repeat(rows, FP8_BLOCK, axis=1)[:, :outputs].reshape(shape)
