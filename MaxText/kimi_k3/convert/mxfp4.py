"""MXFP4 as stored: two E2M1 codes a byte, and one E8M0 scale byte for each group of 32 inputs.

The low nibble is the even element. A code is a sign (bit 3) and a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6; a scale
byte s stands for 2 ** (s - 127), and 255 for NaN. Every product is exact in float32 and in bfloat16 up to s = 252; from
253 on the larger magnitudes overflow, which `check` refuses.

Source: OCP Microscaling Formats (MX) Specification v1.0; compressed-tensors' `mxfp4-pack-quantized`.
"""

from __future__ import annotations

import functools

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
_BLOCK_BYTES = 1 << 20  # Decode a million packed bytes at a time: the index array is 8 bytes each.


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
