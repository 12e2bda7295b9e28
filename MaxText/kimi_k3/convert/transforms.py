"""What happens to a stored tensor on its way into a leaf, by name. All but decoding can be undone byte for byte."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import numpy as np

from kimi_k3.convert import mxfp4
from kimi_k3.errors import InputError


class Transform(enum.StrEnum):
  """How the stored tensor(s) of a piece become a slice of a leaf.

  RESHAPE: same elements in the same order, other axes.
  TRANSPOSE: [out, ...] becomes [..., out], then either side is split into axes such as heads.
  NARROW: a vector with zeros past the end of the leaf loses them.
  SCALES: as stored, after a check that the packed codes beside them can be represented.
  DECODE: packed codes and scales become weights, then TRANSPOSE.
  """

  RESHAPE = "reshape"
  TRANSPOSE = "transpose"
  NARROW = "narrow"
  SCALES = "scales"
  DECODE = "decode"


def apply(
  transform: Transform, names: Sequence[str], read: Callable[[str], np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
  """Returns the slice of a leaf, `shape` large; a view of the stored data where no arithmetic is needed.

  Args:
    transform: What to do.
    names: The piece's stored tensors: one, or codes and scales.
    read: Reads a stored tensor.
    shape: Shape of the slice.

  Raises:
    InputError: if the values cannot be represented: padding that is not zero, or codes outside bfloat16.
  """
  match transform:
    case Transform.RESHAPE:
      return read(names[0]).reshape(shape)
    case Transform.TRANSPOSE:
      return _transposed(read(names[0]), shape)
    case Transform.NARROW:
      return _narrowed(read(names[0]), shape, names[0])
    case Transform.SCALES:
      return _checked_scales(names, read).reshape(shape)
    case Transform.DECODE:
      scales = _checked_scales(names, read)
      return _transposed(mxfp4.decode(read(names[0]), scales), shape)


def invert(transform: Transform, leaf: np.ndarray, stored_shape: tuple[int, ...]) -> np.ndarray:
  """Returns the tensor as it was stored, from a slice of a leaf. Of SCALES, the scales.

  Raises:
    ValueError: for DECODE, which forgets how the weights were packed.
  """
  match transform:
    case Transform.RESHAPE | Transform.SCALES:
      return leaf.reshape(stored_shape)
    case Transform.TRANSPOSE:
      return leaf.reshape(-1, stored_shape[0]).T.reshape(stored_shape)
    case Transform.NARROW:
      return np.pad(leaf, (0, stored_shape[0] - leaf.shape[0]))
    case Transform.DECODE:
      raise ValueError("decoded weights cannot be packed again as they were")


def _checked_scales(names: Sequence[str], read: Callable[[str], np.ndarray]) -> np.ndarray:
  """The scales, after a check that no weight is NaN or overflows. Reads the codes only where a scale is suspect."""
  scales = read(names[1])
  if scales.max(initial=0) > mxfp4.LAST_SAFE_SCALE:
    mxfp4.check(read(names[0]), scales, names[1])
  return scales


def _transposed(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  out = stored.shape[0]
  return stored.reshape(out, math.prod(stored.shape[1:])).T.reshape(shape)


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
