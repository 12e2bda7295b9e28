"""Block-wise FP8: float8_e4m3fn codes, and one float32 scale for each block of 128 outputs times 128 inputs.

weight = code * scale, as the `weight_scale_inv` of others has it. The scale is the smallest power of two with which no
code of the block is above 448, the largest there is; a block of zeros has scale 1. So a code times its scale is exact
in bfloat16, and as no scale is below 2**-117, no such product is subnormal either. Blocks at the edges are smaller
where a size is no multiple of 128. See docs/decisions/0010-fp8-block.md.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int32, UInt16

from kimi_k3.config import FP8_BLOCK
from kimi_k3.errors import InputError

DTYPE = ml_dtypes.float8_e4m3fn
LEAST_EXPONENT = -117  # of a scale: the smallest code, 2**-9, then gives 2**-126, the smallest normal number.
# The largest weight: rounded up it would be 2**128, which no bfloat16 holds.
LARGEST_WEIGHT = 240 * 2.0**120

_ROWS = 32  # encoded at a time, a part of a block: the temporaries of 14 bytes a weight then stay in a cache.
_BF16_MAGNITUDE = 0x7FFF  # All bits but the sign: magnitudes are in the order of these integers.
_BF16_MANTISSA_BITS, _BF16_BIAS = 7, 127
_LARGEST_CODE_EXPONENT = 8  # 448 = 1.75 * 2**8
_LARGEST_CODE_MANTISSA = 0x60  # of 1.75, in bfloat16's seven bits


def encode(
  weights: Float[np.ndarray, "out in_"], name: str
) -> tuple[Float[np.ndarray, "out in_"], Float[np.ndarray, "out_blocks in_blocks"]]:
  """Returns codes and scales of a bfloat16 matrix as it is stored, rounded to nearest, ties to even.

  A range of rows that starts at a multiple of 128, and ends at one or with the matrix, has the codes and scales that it
  has in the whole.

  Args:
    weights: bfloat16.
    name: Of the tensor, for errors.

  Raises:
    InputError: naming `name`, if a weight is NaN, infinite or above LARGEST_WEIGHT.
  """
  codes, weights = np.empty(weights.shape, np.uint8), np.ascontiguousarray(weights)
  exponents = _exponents(weights, name)
  factors = np.repeat(_powers_of_two(-exponents), FP8_BLOCK, axis=1)[:, : weights.shape[1]]
  for row in range(0, len(weights), _ROWS):
    # A power of two only moves the exponent: the product is a bfloat16, the upper half of the float32's bits.
    scaled = weights[row : row + _ROWS].astype(np.float32) * factors[row // FP8_BLOCK]
    codes[row : row + _ROWS] = _code_table().take(scaled.view(np.uint16)[:, 1::2])
  return codes.view(DTYPE), _powers_of_two(exponents)


def block_scales(weights: Float[np.ndarray, "out in_"], name: str) -> Float[np.ndarray, "out_blocks in_blocks"]:
  """Returns the scales that `encode` gives, float32.

  Raises:
    InputError: as `encode`.
  """
  return _powers_of_two(_exponents(weights, name))


def num_blocks(size: int) -> int:
  """How many blocks an axis has, the smaller one at its end included."""
  return -(-size // FP8_BLOCK)


def _exponents(weights: np.ndarray, name: str) -> Int32[np.ndarray, "out_blocks in_blocks"]:
  """Exponents of the scales."""
  out, in_size = weights.shape
  largest = np.empty((num_blocks(out), num_blocks(in_size)), np.uint16)
  starts = np.arange(0, in_size, FP8_BLOCK)
  for block, row in enumerate(range(0, out, FP8_BLOCK)):
    magnitudes = weights[row : row + FP8_BLOCK].view(np.uint16) & _BF16_MAGNITUDE
    largest[block] = np.maximum.reduceat(magnitudes.max(axis=0), starts)
  _check(weights, largest, name)
  exponent = (largest >> _BF16_MANTISSA_BITS).astype(np.int32) - (_BF16_BIAS + _LARGEST_CODE_EXPONENT)
  exponent += (largest & ((1 << _BF16_MANTISSA_BITS) - 1)) > _LARGEST_CODE_MANTISSA
  return np.where(largest == 0, np.int32(0), np.maximum(exponent, np.int32(LEAST_EXPONENT)))


def _check(weights: np.ndarray, largest: UInt16[np.ndarray, "out_blocks in_blocks"], name: str) -> None:
  limit = np.array(LARGEST_WEIGHT, ml_dtypes.bfloat16).view(np.uint16)
  if largest.max(initial=0) <= limit:
    return
  found = weights[(weights.view(np.uint16) & _BF16_MAGNITUDE) > limit]
  raise InputError(
    f"{name}: {len(found)} weight(s) are NaN, infinite or above {LARGEST_WEIGHT:.4g} (the first is {found[0]}), which "
    "no FP8 code and scale stand for: download the shard again, or keep it as stored"
  )


def _powers_of_two(exponents: np.ndarray) -> np.ndarray:
  return np.ldexp(np.float32(1), exponents)


@functools.cache
def _code_table() -> np.ndarray:
  """The code of every bfloat16, by its bits: one lookup is ten times as fast as a cast."""
  values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  with np.errstate(invalid="ignore", over="ignore"):
    table = values.astype(DTYPE).view(np.uint8)
  table.flags.writeable = False
  return table
