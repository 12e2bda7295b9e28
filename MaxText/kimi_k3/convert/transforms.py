"""What happens to a stored tensor on its way into a leaf, by name. All but those in LOSSY can be undone."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import numpy as np

from kimi_k3.config import FP8_BLOCK
from kimi_k3.convert import fp8_block, mxfp4
from kimi_k3.errors import InputError

_TRANSPOSE_ROWS = 32  # of two bytes: a cache line
_SCALED_BYTES = 16 * 1024 * 1024  # 16 MiB of bfloat16: scales are found from a matrix of any size in pieces of this.


# Reads rows of a stored tensor: its name, the first row along its first axis, and the one after the last.
Read = Callable[[str, int, int], np.ndarray]


class Transform(enum.StrEnum):
  """How the stored tensor(s) of a piece become a slice of a leaf.

  RESHAPE: same elements in the same order, other axes.
  TRANSPOSE: [out, ...] becomes [..., out], then either side is split into axes such as heads.
  NARROW: a vector with zeros past the end of the leaf loses them.
  SCALES: as stored, after a check that the packed codes beside them can be represented.
  DECODE: packed codes and scales become weights, then TRANSPOSE.
  PACK_CODES, PACK_SCALES: bfloat16 becomes the codes of MXFP4, or their scales, as a release would store them.
  FP8_CODES: bfloat16, or what DECODE makes of codes and scales, becomes float8_e4m3fn, then TRANSPOSE.
  FP8_SCALES: the float32 scales beside them, one for each block of 128 inputs x 128 outputs.
  """

  RESHAPE = "reshape"
  TRANSPOSE = "transpose"
  NARROW = "narrow"
  SCALES = "scales"
  DECODE = "decode"
  PACK_CODES = "pack-codes"
  PACK_SCALES = "pack-scales"
  FP8_CODES = "fp8-codes"
  FP8_SCALES = "fp8-scales"


# Those whose leaf has the stored rows as its last axes, not as its first.
OUTPUT_LAST = (Transform.TRANSPOSE, Transform.DECODE, Transform.FP8_CODES)

# Those that forget what was stored.
LOSSY = {
  Transform.DECODE: "decoded weights cannot be packed again as they were",
  Transform.PACK_CODES: "weights packed in MXFP4 were rounded",
  Transform.PACK_SCALES: "scales of weights packed in MXFP4 hold no weights",
  Transform.FP8_CODES: "weights in FP8 were rounded",
  Transform.FP8_SCALES: "scales of weights in FP8 hold no weights",
}


def apply(
  transform: Transform, names: Sequence[str], read: Read, shape: tuple[int, ...], rows: tuple[int, int]
) -> np.ndarray:
  """Returns what some rows of the stored tensors become, `shape` large and contiguous.

  Args:
    transform: What to do.
    names: The piece's stored tensors: one, or codes and scales of MXFP4.
    read: Reads rows of a stored tensor.
    shape: Of the result: the slice of a leaf, or the part of it that these rows make.
    rows: First row and the one after the last. In FP8, both whole blocks from the start, or the last row's.

  Raises:
    InputError: if the values cannot be represented: padding that is not zero, codes outside bfloat16, or a weight to be
      rounded that is not finite.
  """
  match transform:
    case Transform.RESHAPE:
      return read(names[0], *rows).reshape(shape)
    case Transform.TRANSPOSE:
      return _transposed(read(names[0], *rows), shape)
    case Transform.NARROW:
      return _narrowed(read(names[0], *rows), shape, names[0])
    case Transform.SCALES:
      return _checked_scales(names, read, rows).reshape(shape)
    case Transform.DECODE:
      return _transposed(_weights(names, read, rows), shape)
    case Transform.PACK_CODES:
      return mxfp4.pack(read(names[0], *rows), names[0])[0].reshape(shape)
    case Transform.PACK_SCALES:
      return mxfp4.group_scales(read(names[0], *rows), names[0]).reshape(shape)
    case Transform.FP8_CODES:
      assert rows[0] % FP8_BLOCK == 0, rows
      return _transposed(fp8_block.encode(_weights(names, read, rows), names[0])[0], shape)
    case Transform.FP8_SCALES:
      return _transposed(_block_scales(names, read, rows, shape), shape)


def invert(transform: Transform, leaf: np.ndarray, stored_shape: tuple[int, ...]) -> np.ndarray:
  """Returns the tensor as it was stored, from a slice of a leaf, or rows of it from their part. Of SCALES, the scales.

  Args:
    transform: What was done.
    leaf: The slice or part.
    stored_shape: Of the result.

  Raises:
    ValueError: for those in LOSSY, which forget it.
  """
  match transform:
    case Transform.RESHAPE | Transform.SCALES:
      return leaf.reshape(stored_shape)
    case Transform.TRANSPOSE:
      return transposed(leaf.reshape(-1, stored_shape[0])).reshape(stored_shape)
    case Transform.NARROW:
      return np.pad(leaf, (0, stored_shape[0] - leaf.shape[0]))
    case _:
      raise ValueError(f"{transform} cannot be undone: {LOSSY[transform]}")


def transposed(matrix: np.ndarray) -> np.ndarray:
  """Returns the transpose of [rows, columns] as a contiguous array, three times as fast as numpy's own copy."""
  result = np.empty(matrix.shape[::-1], matrix.dtype)
  # As integers: numpy copies its own types by cache lines, others element by element.
  integer = np.dtype(f"u{matrix.itemsize}")
  source, target = matrix.view(integer), result.view(integer)
  for start in range(0, len(source), _TRANSPOSE_ROWS):
    target[:, start : start + _TRANSPOSE_ROWS] = source[start : start + _TRANSPOSE_ROWS].T
  return result


def _checked_scales(names: Sequence[str], read: Read, rows: tuple[int, int]) -> np.ndarray:
  """The scales, after a check that no weight is NaN or overflows. Reads the codes only where a scale is suspect."""
  scales = read(names[1], *rows)
  if scales.max(initial=0) > mxfp4.LAST_SAFE_SCALE:
    mxfp4.check(read(names[0], *rows), scales, names[1])
  return scales


def _weights(names: Sequence[str], read: Read, rows: tuple[int, int]) -> np.ndarray:
  """Rows of a matrix in bfloat16, whether it is stored so or packed."""
  if len(names) == 1:
    return read(names[0], *rows)
  scales = _checked_scales(names, read, rows)
  return mxfp4.decode(read(names[0], *rows), scales)


def _block_scales(names: Sequence[str], read: Read, rows: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
  """The scales [output blocks, input blocks] of some rows, of which few are held at a time."""
  assert rows[0] % FP8_BLOCK == 0, rows
  row_bytes = 2 * FP8_BLOCK * shape[0]  # of bfloat16, for all inputs
  step = max(1, _SCALED_BYTES // (row_bytes * FP8_BLOCK)) * FP8_BLOCK
  pieces = [(start, min(start + step, rows[1])) for start in range(rows[0], rows[1], step)]
  return np.concatenate([fp8_block.block_scales(_weights(names, read, piece), names[0]) for piece in pieces])


def _transposed(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  return transposed(stored.reshape(stored.shape[0], math.prod(stored.shape[1:]))).reshape(shape)


def _narrowed(stored: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
  """The first rows. The padding must be all zero bits: a minus zero or a NaN would be lost unseen."""
  (heads,) = shape
  padding = stored[heads:]
  count = int(np.count_nonzero(padding.view(np.uint8).reshape(len(padding), padding.itemsize).any(axis=1)))
  if count:
    raise InputError(
      f"{name}: {heads} heads then zero padding expected, {count} of {len(padding)} non-zero past row {heads}: not the "
      "released layout; check linear_attn_config.num_heads in config.json"
    )
  return stored[:heads]
