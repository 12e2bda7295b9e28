"""How far weights in FP8 blocks are from the source's, measured in what OUT holds and held against the format's bound.

A code is the E4M3 number nearest to weight / scale, so the error is at most half a unit in the last of its three binary
places: 2**-4 of the weight where the code is normal, 2**-10 of the scale where it is subnormal.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator

import numpy as np

from kimi_k3.config import FP8_BLOCK
from kimi_k3.convert import mxfp4, transforms
from kimi_k3.convert.chunks import Chunk
from kimi_k3.convert.database import UnreadableError
from kimi_k3.convert.index import Source
from kimi_k3.convert.mapping import Leaf, Piece
from kimi_k3.convert.reader import Output
from kimi_k3.convert.transforms import Transform
from kimi_k3.convert.write import leaf_name

RELATIVE_BOUND = 2.0**-4
SUBNORMAL_BOUND = 2.0**-10  # of the scale
SCALES_SUFFIX = "_scale_inv"
_ROWS = FP8_BLOCK  # Looked at at a time, in float64: differences and bounds are then exact.


@dataclasses.dataclass
class LeafErrors:
  """Errors of one leaf against the source's weights.

  Attributes:
    largest: Absolute.
    largest_of_block: Relative to the largest weight of the block.
    squares: Sum of squared errors, and `weight_squares` of squared weights.
    values: How many were looked at.
    violations: Of these, how many exceed the bound; a NaN is one.
  """

  largest: float = 0.0
  largest_of_block: float = 0.0
  squares: float = 0.0
  weight_squares: float = 0.0
  values: int = 0
  violations: int = 0

  @property
  def rms_relative(self) -> float:
    """Root of mean squared error over that of the weights; 0 where all weights are 0."""
    return math.sqrt(self.squares / self.weight_squares) if self.weight_squares else 0.0

  def add(self, other: LeafErrors) -> None:
    """Takes in another part of the leaf."""
    self.largest = max(self.largest, other.largest)
    self.largest_of_block = max(self.largest_of_block, other.largest_of_block)
    self.squares += other.squares
    self.weight_squares += other.weight_squares
    self.values += other.values
    self.violations += other.violations


class Errors:
  """Errors of all leaves in FP8, gathered chunk by chunk from several threads."""

  def __init__(self):
    self.leaves: dict[str, LeafErrors] = {}
    self._lock = threading.Lock()

  def add(self, leaf: Leaf, chunk: Chunk, codes: np.ndarray, source: Source, out: Output) -> None:
    """Measures one chunk of codes as OUT holds it. Any other leaf is left alone.

    Args:
      leaf: The leaf of the codes.
      chunk: Which chunk.
      codes: Its values, `chunk.shape` large.
      source: Where the weights are.
      out: Where the scales are.
    """
    if leaf.transform is not Transform.FP8_CODES:
      return
    try:
      index = tuple(slice(i, i + 1) for i in chunk.piece.index)
      scales = out.read(leaf_name(leaf) + SCALES_SUFFIX, index)
    except UnreadableError:
      return  # The scales' own leaf is at fault, and named as such.
    inputs = math.prod(leaf.slice_shape) // leaf.stored[0][1][0]
    found = LeafErrors()
    stored = transforms.transposed(codes.reshape(inputs, -1))  # [outputs, inputs], as the source's
    blocks = scales.reshape(scales.shape[len(index) :]).T.astype(np.float64)
    for start, weights in _weights(source, chunk.piece, chunk.rows):
      part = stored[start - chunk.rows[0] :][: len(weights)]
      row = np.repeat(blocks[start // FP8_BLOCK], FP8_BLOCK)[:inputs]
      found.add(_errors(weights.astype(np.float64), part.astype(np.float64), row))
    with self._lock:
      self.leaves.setdefault(leaf_name(leaf), LeafErrors()).add(found)

  def faults(self) -> list[str]:
    """Leaves with an error beyond the bound."""
    return [
      f"{name}: {e.violations:,} of {e.values:,} values are further from the source's than FP8 rounding goes (largest "
      f"error {e.largest:.3g})"
      for name, e in sorted(self.leaves.items())
      if e.violations
    ]

  def summary(self) -> str:
    """One line about all of them."""
    total = LeafErrors()
    for errors in self.leaves.values():
      total.add(errors)
    return (
      f"{len(self.leaves)} leaves in FP8 within half a unit in the last place; error at most "
      f"{total.largest_of_block:.3g} of a block's largest weight, {total.rms_relative:.3g} RMS"
    )

  def as_json(self) -> dict[str, dict[str, int | float]]:
    """Per leaf: values, max_abs, max_of_block, rms_relative, violations."""
    return {
      name: {
          "values": e.values, "max_abs": e.largest, "max_of_block": e.largest_of_block, "rms_relative": e.rms_relative,
          "violations": e.violations,
      }
      for name, e in sorted(self.leaves.items())
    }  # fmt: skip


def _weights(source: Source, piece: Piece, rows: tuple[int, int]) -> Iterator[tuple[int, np.ndarray]]:
  """Rows of the source's matrix, decoded if it is packed, one row of blocks at a time."""
  for start in range(*rows, _ROWS):
    span = (start, min(start + _ROWS, rows[1]))
    first, *scales = (source.read(name, *span) for name in piece.names)
    yield start, mxfp4.decode(first, scales[0]) if scales else first


def _errors(weights: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> LeafErrors:
  """Errors of one row of blocks [outputs, inputs], all float64; `scales` has one entry an input."""
  error = np.abs(codes * scales - weights)
  size = np.abs(weights)
  within = error <= np.maximum(RELATIVE_BOUND * size, SUBNORMAL_BOUND * scales)
  starts = np.arange(0, weights.shape[1], FP8_BLOCK)
  of_block, largest = (np.maximum.reduceat(a.max(axis=0), starts) for a in (error, size))
  relative = np.divide(of_block, largest, out=np.zeros_like(largest), where=largest > 0)
  return LeafErrors(
      float(error.max()), float(relative.max()), float(np.square(error).sum()), float(np.square(size).sum()),
      weights.size, int(within.size - np.count_nonzero(within)),
  )  # fmt: skip
