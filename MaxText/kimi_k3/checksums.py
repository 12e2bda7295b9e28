"""A checksum of every leaf: computed while `convert` writes it, recorded in OUT/conversion.json, compared on loading.

Tree, shapes and dtypes cannot show a square matrix that was transposed, two leaves of one shape that changed places, or
the content of another training; and a chunk's own checksum moves with the chunk. CRC-32 takes 0.3 s a GiB, little
beside reading and writing it, and finds accidents, not forgery.
"""

from __future__ import annotations

import zlib

import numpy as np

RECORD = "conversion.json"  # beside the step directory of a conversion
FIELD = "checksums"  # in it: hexadecimal CRC-32 by leaf


def extend(checksum: int, part: np.ndarray) -> int:
  """Returns the CRC-32 of a leaf whose bytes, in C order, gave `checksum` so far (0: none yet), then hold `part`."""
  return zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8), checksum)


def spelled(checksum: int) -> str:
  """A checksum as it is recorded."""
  return f"{checksum:08x}"
