"""A checksum of every leaf: made while `convert` writes it, recorded in OUT/conversion.json, compared on loading.

Tree, shapes and dtypes cannot show a square matrix that was transposed, two leaves of one shape that changed places, or
the content of another training; and a chunk's own checksum moves with the chunk. A leaf's checksum is the CRC-32C of
those of its chunks, four bytes each, in the order of the grid: chunks can be written in any order by any machine, and
each byte is summed once, as the array's own codec needs that sum too. 12 GB/s a core. It finds accidents, not forgery.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np

RECORD = "conversion.json"  # beside the step directory of a conversion
FIELD = "checksums"  # in it: eight hexadecimal digits by leaf
CHUNKS_FIELD = "chunks"  # in it: the shape of a chunk by leaf
CHECKSUM_BYTES = 4  # of a chunk, little endian: as the array's crc32c codec stores it after the chunk


def chunk_checksum(chunk: np.ndarray) -> int:
  """Returns the CRC-32C of a whole chunk, its bytes in C order."""
  # As bytes: the extension takes no array of a dtype that numpy learnt later.
  return google_crc32c.value(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))


def leaf_checksum(chunk_checksums: Iterable[int]) -> str:
  """Returns a leaf's checksum as it is recorded, from those of its chunks in the order of the grid."""
  joined = b"".join(checksum.to_bytes(CHECKSUM_BYTES, "little") for checksum in chunk_checksums)
  return f"{google_crc32c.value(joined):08x}"


def array_checksum(array: np.ndarray, chunk_shape: Sequence[int]) -> str:
  """Returns the checksum of a leaf that is in memory.

  Args:
    array: The leaf.
    chunk_shape: Of its chunks; the last along an axis is filled up with zeros, as it is stored.
  """
  return leaf_checksum(chunk_checksum(chunk) for chunk in _chunks(array, chunk_shape))


def _chunks(array: np.ndarray, shape: Sequence[int]) -> Iterable[np.ndarray]:
  starts = (range(0, size, step) for size, step in zip(array.shape, shape, strict=True))
  for start in itertools.product(*starts):
    # The dots: an array without axes stays an array.
    part = array[(*(slice(first, first + step) for first, step in zip(start, shape, strict=True)), ...)]
    yield filled(part, shape)


def filled(part: np.ndarray, shape: Sequence[int]) -> np.ndarray:
  """Returns a chunk as it is stored: `part`, with zeros where the array ends before the chunk does."""
  if part.shape == tuple(shape):
    return part
  chunk = np.zeros(shape, part.dtype)
  chunk[tuple(slice(size) for size in part.shape)] = part
  return chunk
