"""MXFP4 as stored: two E2M1 codes a byte, and one E8M0 scale byte for each group of 32 inputs.

The low nibble is the even element. A code is a sign (bit 3) and a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6; a scale
byte s stands for 2 ** (s - 127), and 255 for NaN. Every product is exact in float32 and in bfloat16 up to s = 252; from
253 on the larger magnitudes overflow, which `check` refuses.

`pack` goes the other way, by the rule of the specification (section 6.3): the scale of a group is the largest power of
two in its largest weight over 4, the largest power of two among the magnitudes; what is then above 6 becomes 6.

Source: OCP Microscaling Formats (MX) Specification v1.0; compressed-tensors' `mxfp4-pack-quantized`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from kimi_k3.config import MXFP4_GROUP
from kimi_k3.errors import InputError

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127
NAN_SCALE = 255
LAST_SAFE_SCALE = 252  # 6 * 2 ** (252 - 127) is the largest product that bfloat16 and float32 hold.
PACKED_GROUP = MXFP4_GROUP // 2
ZERO_GROUP_SCALE = 0  # of a group of zeros: the least scale, as of any group whose scale would be below it.
_BLOCK_BYTES = 1 << 20  # Decode a million packed bytes at a time: the index array is 8 bytes each.
_BLOCK_WEIGHTS = 1 << 17  # Packed at a time: the temporaries of 16 bytes a weight then stay in a cache.
_LARGEST_EXPONENT = 2  # of the magnitudes: 4 is 2 ** 2
_BF16_MAGNITUDE = 0x7FFF  # All bits but the sign: magnitudes are in the order of these integers.
_BF16_INFINITY = 0x7F80  # What is larger is NaN.
_BF16_MANTISSA_BITS = 7


def decode(
  packed: UInt8[np.ndarray, "out packed_in"], scale: UInt8[np.ndarray, "out groups"], dtype=ml_dtypes.bfloat16
) -> Float[np.ndarray, "out in_"]:
  """Returns the weights, exactly, as bfloat16 or float32.

  Every (scale byte, packed byte) has its two values in a table, as one integer that holds both: one lookup a byte and
  no floating-point arithmetic on the way.

  Args:
    packed: Two codes a byte.
    scale: Scale bytes, one for 16 packed bytes.
    dtype: bfloat16 or float32.
  """
  out, groups = scale.shape
  if packed.shape != (out, groups * PACKED_GROUP):
    raise ValueError(f"packed {packed.shape} does not fit scale {scale.shape}: {PACKED_GROUP} bytes a scale expected")
  table = _pair_table(np.dtype(dtype))
  pairs = np.empty((out, groups, PACKED_GROUP), table.dtype)
  rows = max(1, _BLOCK_BYTES // max(1, packed.shape[1]))
  for start in range(0, out, rows):
    block = slice(start, start + rows)
    codes = packed[block].reshape(-1, groups, PACKED_GROUP).astype(np.intp)
    codes |= scale[block, :, None].astype(np.intp) << 8
    np.take(table, codes, out=pairs[block], mode="clip")  # Never clips; the other modes buffer the output.
  return pairs.view(dtype).reshape(out, groups * MXFP4_GROUP)


def check(packed: UInt8[np.ndarray, "out packed_in"], scale: UInt8[np.ndarray, "out groups"], name: str) -> None:
  """Raises unless every weight is a finite bfloat16.

  Raises:
    InputError: naming `name`, for the scale byte 255 (NaN) and for 253 and 254 where a weight overflows.
  """
  if scale.size == 0 or scale.max() <= LAST_SAFE_SCALE:
    return
  rows, groups = np.nonzero(scale > LAST_SAFE_SCALE)
  suspects = packed.reshape(*scale.shape, PACKED_GROUP)[rows, groups]
  values = decode(suspects, scale[rows, groups][:, None])
  faulty = ~np.isfinite(values.astype(np.float32)).all(axis=1)
  if faulty.any():
    first = int(np.argmax(faulty))
    found = int(scale[rows[first], groups[first]])
    meaning = "means NaN" if found == NAN_SCALE else "overflows bfloat16"
    raise InputError(
      f"{name}: scale byte {found} at row {rows[first]}, group {groups[first]} {meaning} ({int(faulty.sum())} such "
      f"group(s)), expected at most {LAST_SAFE_SCALE}: the weights cannot be represented, download the shard again"
    )


def pack(
  weights: Float[np.ndarray, "out in_"], name: str
) -> tuple[UInt8[np.ndarray, "out packed_in"], UInt8[np.ndarray, "out groups"]]:
  """Returns codes and scale bytes of a bfloat16 matrix as it is stored; what was MXFP4 comes back exactly.

  Each group of 32 inputs gets the scale 2 ** (floor(log2(largest magnitude)) - 2), but at least 2 ** -127, which a
  group of zeros has too. Codes are rounded to nearest, ties to even, and saturate at 6. Zeros keep their sign.

  Args:
    weights: bfloat16.
    name: Of the tensor, for errors.

  Raises:
    InputError: naming `name`, if a weight is NaN or infinite, or the inputs are no whole groups.
  """
  weights = np.ascontiguousarray(weights)
  scale = group_scales(weights, name)
  out, groups = scale.shape
  packed = np.empty((out, groups * PACKED_GROUP), np.uint8)
  for block in _row_blocks(weights):
    exponents = SCALE_BIAS - scale[block, :, None].astype(np.int32)
    scaled = weights[block].reshape(-1, groups, MXFP4_GROUP).astype(np.float32) * np.ldexp(np.float32(1), exponents)
    # A power of two only moves the exponent: each is a bfloat16, the upper half of the float32's bits.
    codes = _code_table().take(scaled.view(np.uint16)[..., 1::2])
    pairs = codes.reshape(-1, groups * MXFP4_GROUP).view(np.uint16)  # the even element is the lower byte
    packed[block] = pairs | pairs >> 4  # and the lower byte is kept
  return packed, scale


def group_scales(weights: Float[np.ndarray, "out in_"], name: str) -> UInt8[np.ndarray, "out groups"]:
  """Returns the scale bytes that `pack` gives.

  Raises:
    InputError: as `pack`.
  """
  out, inputs = weights.shape
  if inputs % MXFP4_GROUP:
    raise InputError(f"{name}: {inputs} inputs, expected a multiple of {MXFP4_GROUP}: only whole groups can be packed")
  largest = np.empty((out, inputs // MXFP4_GROUP), np.uint16)
  for block in _row_blocks(weights):
    magnitudes = weights[block].view(np.uint16) & _BF16_MAGNITUDE
    largest[block] = magnitudes.reshape(-1, inputs // MXFP4_GROUP, MXFP4_GROUP).max(axis=2)
  if largest.max(initial=0) >= _BF16_INFINITY:
    count = sum(int(np.count_nonzero((w.view(np.uint16) & _BF16_MAGNITUDE) >= _BF16_INFINITY)) for w in weights)
    raise InputError(
      f"{name}: {count} weight(s) are NaN or infinite, which no MXFP4 code stands for: download the shard again, or "
      "keep it as stored"
    )
  # The exponent of a bfloat16 has the bias of a scale byte. It is 0 for subnormals, which are below the least scale.
  exponent = (largest >> _BF16_MANTISSA_BITS).astype(np.uint8)
  return np.maximum(exponent, _LARGEST_EXPONENT + ZERO_GROUP_SCALE) - np.uint8(_LARGEST_EXPONENT)


def _row_blocks(weights: np.ndarray) -> Iterator[slice]:
  rows = max(1, _BLOCK_WEIGHTS // max(1, weights.shape[1]))
  return (slice(start, start + rows) for start in range(0, len(weights), rows))


@functools.cache
def _code_table() -> np.ndarray:
  """The code of every bfloat16 that a scale has divided, by its bits. A code is even if its last bit is 0."""
  values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
  magnitudes = np.array(MAGNITUDES, np.float32)
  middles = (magnitudes[1:] + magnitudes[:-1]) / 2
  below = np.searchsorted(middles, np.abs(values), side="left")  # A tie goes down
  above = np.searchsorted(middles, np.abs(values), side="right")  # or up
  codes = np.where(below % 2 == 0, below, above) | np.signbit(values) << 3
  table = codes.astype(np.uint8)
  table.flags.writeable = False
  return table


@functools.cache
def _pair_table(dtype: np.dtype) -> np.ndarray:
  """The two values of each scale * 256 + byte, side by side in one unsigned integer."""
  if dtype not in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)):
    raise ValueError(f"MXFP4 decodes to bfloat16 or float32, not {dtype}")
  signed = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)])
  byte = np.arange(256)
  pairs = np.stack([signed[byte & 0xF], signed[byte >> 4]], axis=-1)
  factors = np.ldexp(1.0, np.arange(256) - SCALE_BIAS)
  factors[NAN_SCALE] = np.nan
  with np.errstate(over="ignore"):
    values = (factors[:, None, None] * pairs).astype(dtype)
  table = np.ascontiguousarray(values).view(np.uint32 if dtype.itemsize == 2 else np.uint64).reshape(-1)
  table.flags.writeable = False
  return table
