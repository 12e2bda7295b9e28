"""The work of a conversion cut into slices: what is written, journaled, resumed and shared out as one. Pure.

A slice is a data file: some chunks, of whatever leaves, one after the other. Chunks go in the order in which the source
holds what they are made of, so a slice reads one stretch of one shard. Which chunk is where depends on nothing but the
plan: not on workers, memory, machines or earlier runs.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (numpy learns the name bfloat16 from it)
import numpy as np

from kimi_k3.checksums import CHECKSUM_BYTES
from kimi_k3.convert import chunks
from kimi_k3.convert.chunks import Chunk
from kimi_k3.convert.index import StoredTensor
from kimi_k3.convert.mapping import Leaf, Piece
from kimi_k3.convert.transforms import Transform

MAX_SLICE_BYTES = 64 * 1024 * 1024  # 64 MiB: a file of a good size for a disk or a bucket.
MIN_SLICE_BYTES = 64 * 1024  # 64 KiB
NUM_SLICES = 2000  # At least, where they are not smaller than that: what is lost with a kill is a slice a worker.
DATA_DIRECTORY = "d"


class Placed(NamedTuple):
  """One chunk of a slice and where it stands in its file: `offset` and `nbytes`, its checksum included."""

  leaf: int
  chunk: Chunk
  offset: int
  nbytes: int


class Slices:
  """All slices of a conversion, numbered from 0 in the order of the source."""

  def __init__(self, leaves: tuple[Leaf, ...], tensors: Mapping[str, StoredTensor]):
    """Cuts the leaves.

    Args:
      leaves: Of the plan.
      tensors: The source's, by name: where each is.
    """
    self.leaves = leaves
    self._tensors = tensors
    self._chunk_bytes = [_stored_bytes(leaf) for leaf in leaves]
    self._order = self._source_order()  # [chunks, 3]: leaf, piece, which chunk of the piece
    sizes = np.asarray(self._chunk_bytes)[self._order[:, 0]]
    limit = min(MAX_SLICE_BYTES, max(MIN_SLICE_BYTES, int(sizes.sum()) // NUM_SLICES))
    self._bounds = _bounds(sizes.tolist(), limit)
    self._ends = np.cumsum(sizes)  # of the chunks, in the order of the source

  def __len__(self) -> int:
    return len(self._bounds) - 1

  @property
  def num_chunks(self) -> int:
    """Of all leaves."""
    return len(self._order)

  @property
  def nbytes(self) -> int:
    """Of all data files."""
    return int(self._ends[-1])

  def num_chunks_of(self, number: int) -> int:
    """Of one slice."""
    return self._bounds[number + 1] - self._bounds[number]

  def size(self, number: int) -> int:
    """Bytes of one data file."""
    first, last = self._bounds[number], self._bounds[number + 1]
    return int(self._ends[last - 1] - (self._ends[first - 1] if first else 0))

  def chunks(self, number: int) -> Iterator[Placed]:
    """The chunks of a slice, in the order of its file."""
    offset = 0
    for leaf_number, piece_number, part in self._order[self._bounds[number] : self._bounds[number + 1]].tolist():
      leaf = self.leaves[leaf_number]
      chunk = next(itertools.islice(chunks.piece_chunks(leaf, leaf.pieces[piece_number]), part, None))
      yield Placed(leaf_number, chunk, offset, self._chunk_bytes[leaf_number])
      offset += self._chunk_bytes[leaf_number]

  def shards(self, number: int) -> list[str]:
    """The source's files that a slice is made from, sorted."""
    names = (name for placed in self.chunks(number) for name in placed.chunk.piece.names)
    return sorted({self._tensors[name].shard for name in names})

  def part(self, number: int, count: int) -> range:
    """The slices of part `number` of `count`, from 1: one stretch of the source, about as large as the others."""
    starts = [int(self._ends[bound - 1]) if bound else 0 for bound in self._bounds]
    first, last = (bisect.bisect_left(starts, self.nbytes * n // count) for n in (number - 1, number))
    return range(first, last if number < count else len(self))

  def _source_order(self) -> np.ndarray:
    shards = {shard: i for i, shard in enumerate(sorted({tensor.shard for tensor in self._tensors.values()}))}
    rows = []
    for leaf_number, leaf in enumerate(self.leaves):
      single = chunks.num_chunks(leaf) == len(leaf.pieces)
      for piece_number, piece in enumerate(leaf.pieces):
        tensor = self._tensors[_read_name(leaf, piece)]
        shard, row_bytes = shards[tensor.shard], tensor.nbytes // max(1, tensor.shape[0] if tensor.shape else 1)
        if single:
          rows.append((shard, tensor.offset, leaf_number, piece_number, 0))
          continue
        for part, chunk in enumerate(chunks.piece_chunks(leaf, piece)):
          rows.append((shard, tensor.offset + chunk.rows[0] * row_bytes, leaf_number, piece_number, part))
    table = np.array(rows, np.int64)
    return np.ascontiguousarray(table[np.lexsort(table.T[::-1])][:, 2:].astype(np.int32))


def file_name(number: int) -> str:
  """A slice's data file, below the database's directory."""
  return f"{DATA_DIRECTORY}/{number:06d}"


def _read_name(leaf: Leaf, piece: Piece) -> str:
  """The stored tensor that most of a chunk's bytes come from: of scales, the codes are read only when suspect."""
  return piece.names[-1] if leaf.transform is Transform.SCALES else piece.names[0]


def _stored_bytes(leaf: Leaf) -> int:
  """Of a chunk in its file: always the whole chunk, also at the end of an axis."""
  shape = chunks.chunk_shape(leaf)
  return int(np.prod(shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize + CHECKSUM_BYTES


def _bounds(sizes: list[int], limit: int) -> list[int]:
  """Where each slice starts, and the end: as many chunks as stay within the limit, but one at least."""
  bounds, total = [0], 0
  for i, size in enumerate(sizes):
    if total and total + size > limit:
      bounds.append(i)
      total = 0
    total += size
  return [*bounds, len(sizes)]
