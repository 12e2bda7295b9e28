"""The checksum of a leaf against CRC-32C written out, bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kimi_k3 import checksums


def crc32c(data: bytes) -> int:
  """Castagnoli's polynomial, reflected, over one bit after the other (RFC 3720, appendix B.4)."""
  remainder = 0xFFFFFFFF
  for byte in data:
    remainder ^= byte
    for _ in range(8):
      remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
  return remainder ^ 0xFFFFFFFF


def chunked(array: np.ndarray, chunks: list[np.ndarray]) -> str:
  """Of an array whose chunks are these."""
  assert sum(chunk.size for chunk in chunks) >= array.size
  return f"{crc32c(b''.join(crc32c(chunk.tobytes()).to_bytes(4, 'little') for chunk in chunks)):08x}"


def test_the_standards_own_example():
  assert crc32c(b"123456789") == 0xE3069283
  assert checksums.chunk_checksum(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8, ml_dtypes.float8_e4m3fn])
def test_a_chunk_is_summed_by_its_bytes_in_c_order(dtype):
  array = np.arange(24).reshape(2, 3, 4).astype(dtype)
  expected = crc32c(array.tobytes())
  assert checksums.chunk_checksum(array) == expected
  assert checksums.chunk_checksum(np.asfortranarray(array)) == expected
  assert checksums.chunk_checksum(np.stack([array, array], -1)[..., 1]) == expected
  assert checksums.chunk_checksum(array.T) == crc32c(array.T.tobytes()) != expected


def test_a_leaf_is_summed_chunk_by_chunk_in_the_order_of_the_grid():
  array = np.arange(24, dtype=np.float32).reshape(4, 6)
  parts = [array[:2, :3], array[:2, 3:], array[2:, :3], array[2:, 3:]]
  assert checksums.array_checksum(array, (2, 3)) == chunked(array, parts)
  assert checksums.array_checksum(array, (4, 6)) == chunked(array, [array])
  assert checksums.array_checksum(array, (2, 3)) != checksums.array_checksum(array, (4, 6))
  assert checksums.leaf_checksum(crc32c(part.tobytes()) for part in parts) == chunked(array, parts)


def test_the_end_of_an_axis_is_filled_up_with_zeros():
  array = np.arange(1, 16, dtype=np.uint8).reshape(3, 5)
  filled = np.zeros((4, 6), np.uint8)
  filled[:3, :5] = array
  parts = [filled[:2, :3], filled[:2, 3:], filled[2:, :3], filled[2:, 3:]]
  assert checksums.array_checksum(array, (2, 3)) == chunked(array, parts)
  assert checksums.filled(array[2:, 3:], (2, 3)).tolist() == [[14, 15, 0], [0, 0, 0]]
  whole = array[:2, :3]
  assert checksums.filled(whole, (2, 3)) is whole


def test_an_array_without_axes_is_one_chunk():
  array = np.float32(3)[()]
  assert checksums.array_checksum(np.asarray(array), ()) == chunked(np.asarray(array), [np.asarray(array)])


def test_a_checksum_has_eight_digits():
  assert checksums.leaf_checksum([]) == "00000000"
  assert {len(checksums.leaf_checksum([n])) for n in range(300)} == {8}


@pytest.mark.parametrize("change", ["two chunks swapped", "transposed", "one bit", "another dtype", "a zero less"])
def test_what_shapes_do_not_show_the_checksum_does(change):
  array = np.arange(16, dtype=np.int8).reshape(4, 4)
  other = {
    "two chunks swapped": np.concatenate([array[2:], array[:2]]),
    "transposed": np.ascontiguousarray(array.T),
    "one bit": array ^ np.eye(4, dtype=np.int8),
    "another dtype": array.astype(np.int16),
    "a zero less": np.concatenate([array[:, 1:], array[:, :1]], 1),
  }[change]
  assert checksums.array_checksum(other, (2, 4)) != checksums.array_checksum(array, (2, 4))
