"""How a leaf is cut into the chunks of its zarr array, and which stored rows make each. Pure.

A chunk holds one block's and one expert's part, so that a device reads only what it holds, and of a large matrix only
some of the outputs: whatever the transform, those are rows of the stored tensors. So no chunk needs more than
CHUNK_BYTES of the source, and nothing here depends on the machine: the same plan gives the same chunks everywhere. The
scales of FP8 are one chunk all the same: they are small, and are made from a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np

from kimi_k3.config import FP8_BLOCK
from kimi_k3.convert.mapping import Leaf, Piece, Shape
from kimi_k3.convert.transforms import OUTPUT_LAST, Transform

CHUNK_BYTES = 16 * 1024 * 1024  # 16 MiB: large enough for a disk or a bucket; little is lost with a kill.

# Bytes of bfloat16 that one byte of the leaf is made from, where they are more.
_MADE_FROM = {Transform.FP8_CODES: 2, Transform.PACK_CODES: 4, Transform.PACK_SCALES: 64}


class Chunk(NamedTuple):
  """One chunk of one leaf.

  Attributes:
    index: Its place in the grid of chunks, as in its zarr key.
    piece: Which stored tensor(s) make it.
    rows: The first of their rows and the one after the last.
    shape: Of its part of the array: `chunk_shape`, or less at the end of an axis.
  """

  index: Shape
  piece: Piece
  rows: tuple[int, int]
  shape: Shape


class _Cut(NamedTuple):
  """Along `axis` of a slice each chunk has `size` elements, and each element takes `rows` stored rows."""

  axis: int
  size: int
  rows: int


def chunk_shape(leaf: Leaf) -> Shape:
  """Returns the shape of the leaf's chunks, all axes of the leaf included."""
  shape = list(leaf.slice_shape)
  if cut := _cut(leaf):
    shape[cut.axis] = cut.size
  return (*(1 for _ in leaf.pieces[0].index), *shape)


def chunks(leaf: Leaf) -> Iterator[Chunk]:
  """All chunks of a leaf, in the order of the grid."""
  for piece in sorted(leaf.pieces):
    yield from piece_chunks(leaf, piece)


def piece_chunks(leaf: Leaf, piece: Piece) -> Iterator[Chunk]:
  """The chunks that one piece makes, in the order of its rows."""
  shape, before, stored_rows = list(leaf.slice_shape), len(piece.index), (leaf.stored[0][1] or (1,))[0]
  cut = _cut(leaf)
  if cut is None:
    yield Chunk((*piece.index, *(0 for _ in shape)), piece, (0, stored_rows), (*(1 for _ in piece.index), *shape))
    return
  total = shape[cut.axis]
  for number, start in enumerate(range(0, total, cut.size)):
    stop = min(start + cut.size, total)
    index = [0] * (before + len(shape))
    index[:before], index[before + cut.axis] = piece.index, number
    shape[cut.axis] = stop - start
    yield Chunk(tuple(index), piece, (start * cut.rows, stop * cut.rows), (*(1 for _ in piece.index), *shape))


def num_chunks(leaf: Leaf) -> int:
  """How many chunks a leaf has."""
  return math.prod(-(-size // chunk) for size, chunk in zip(leaf.shape, chunk_shape(leaf), strict=True))


def key(index: Shape) -> str:
  """A chunk's zarr key below its array: `c/0/1`, or `c` of an array without axes."""
  return "/".join(("c", *map(str, index)))


def slice_bytes(leaf: Leaf) -> int:
  """Size of what one piece fills."""
  return math.prod(leaf.slice_shape) * np.dtype(leaf.dtype).itemsize


def _cut(leaf: Leaf) -> _Cut | None:
  """Where and how a slice is cut; None where it is one chunk."""
  nbytes = slice_bytes(leaf) * _MADE_FROM.get(leaf.transform, 1)
  if nbytes <= CHUNK_BYTES or leaf.transform is Transform.FP8_SCALES:
    return None
  stored_rows = leaf.stored[0][1][0]
  axis = _output_axis(leaf.slice_shape, stored_rows) if leaf.transform in OUTPUT_LAST else 0
  size = leaf.slice_shape[axis]
  if leaf.transform is Transform.NARROW or stored_rows % size:
    raise AssertionError(f"{'.'.join(leaf.path)}: {nbytes} bytes in one piece that cannot be cut by stored rows")
  rows = stored_rows // size
  # A block of FP8 stays whole: it has one scale.
  unit = FP8_BLOCK // math.gcd(rows, FP8_BLOCK) if leaf.transform is Transform.FP8_CODES else 1
  limit = max(1, CHUNK_BYTES * size // (nbytes * unit)) * unit
  return _Cut(axis, _even(size, limit, unit), rows) if limit < size else None


def _output_axis(shape: Shape, outputs: int) -> int:
  """The first of the last axes that hold the outputs together."""
  return next(axis for axis in range(len(shape)) if math.prod(shape[axis:]) == outputs)


def _even(size: int, limit: int, unit: int) -> int:
  """The largest divisor of `size` in units up to `limit`, if it is not much smaller; else `limit`: the end is less."""
  divisor = next((n for n in range(limit, 0, -unit) if size % n == 0), 0)
  return divisor if 2 * divisor >= limit else limit
