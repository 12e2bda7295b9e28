from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from kimi_k3.convert import chunks, transforms
from kimi_k3.convert.mapping import Leaf, Piece
from kimi_k3.convert.transforms import Transform


def leaf(transform: Transform, shape, stored, dtype="bfloat16", experts=0) -> Leaf:
  """A leaf of one tensor a piece, or with one for each expert."""
  pieces = [Piece((e,), (f"w{e}",)) for e in range(experts)] or [Piece((), ("w",))]
  full = ((experts,) if experts else ()) + shape
  return Leaf(("a", "leaf"), full, dtype, transform, (("BF16", stored),), tuple(pieces))


# (transform, slice, stored, dtype): outputs last and first, with heads and without.
LEAVES = {
  "embedding": (Transform.RESHAPE, (700, 64), (700, 64), "bfloat16"),
  "matrix": (Transform.TRANSPOSE, (64, 700), (700, 64), "bfloat16"),
  "heads": (Transform.TRANSPOSE, (64, 10, 70), (700, 64), "bfloat16"),
  "fp8": (Transform.FP8_CODES, (64, 700), (700, 64), "float8_e4m3fn"),
  "fp8 heads of 192": (Transform.FP8_CODES, (64, 10, 192), (1920, 64), "float8_e4m3fn"),
  "fp8 heads of 70": (Transform.FP8_CODES, (64, 200, 70), (14000, 64), "float8_e4m3fn"),
  "fp8 inputs with heads": (Transform.FP8_CODES, (4, 16, 700), (700, 64), "float8_e4m3fn"),
  "codes": (Transform.PACK_CODES, (700, 32), (700, 64), "uint8"),
  "scales": (Transform.PACK_SCALES, (700, 2), (700, 64), "uint8"),
}
LIMIT = 40 * 1024


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("experts", [0, 2])
def test_chunks_put_together_are_the_leaf(monkeypatch, name, experts):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", LIMIT)
  transform, shape, stored, dtype = LEAVES[name]
  cut = leaf(transform, shape, stored, dtype, experts)
  rng = np.random.default_rng(0)
  tensors = {p.names[0]: rng.standard_normal(stored).astype(ml_dtypes.bfloat16) for p in cut.pieces}

  def read(name, start, stop):
    return tensors[name][start:stop]

  found = np.zeros(cut.shape, np.dtype(dtype))
  steps, seen = chunks.chunk_shape(cut), 0
  for chunk in chunks.chunks(cut):
    place = tuple(
      slice(i * step, i * step + size) for i, step, size in zip(chunk.index, steps, chunk.shape, strict=True)
    )
    part = transforms.apply(transform, chunk.piece.names, read, chunk.shape[len(chunk.piece.index) :], chunk.rows)
    found[place] = part.reshape(chunk.shape)
    seen += 1
    fewest = math.lcm(128, stored[0] // shape[1]) if name.startswith("fp8 heads") else 128
    assert (chunk.rows[1] - chunk.rows[0]) * stored[1] * 2 <= max(LIMIT, fewest * stored[1] * 2)
  assert seen == chunks.num_chunks(cut) > max(1, experts)
  for piece in cut.pieces:
    whole = transforms.apply(transform, piece.names, read, shape, (0, stored[0]))
    assert found[piece.index].tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", [name for name in LEAVES if name.startswith("fp8")])
def test_no_chunk_cuts_a_block_that_has_one_scale(monkeypatch, name):
  transform, shape, stored, dtype = LEAVES[name]
  for limit in (1, 10_000, LIMIT, 100_000, 10**9):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", limit)
    starts = [chunk.rows[0] for chunk in chunks.chunks(leaf(transform, shape, stored, dtype))]
    assert starts[0] == 0
    assert all(start % 128 == 0 for start in starts)


def test_the_scales_of_fp8_are_one_chunk_however_large_the_matrix_is():
  scales = leaf(Transform.FP8_SCALES, (512, 512), (65536, 65536), "float32")
  (chunk,) = chunks.chunks(scales)
  assert (chunk.index, chunk.rows, chunk.shape) == ((0, 0), (0, 65536), (512, 512))


def test_a_leaf_smaller_than_its_source_is_cut_by_the_bytes_of_the_source(monkeypatch):
  """64 MiB of bfloat16 make 32 MiB of FP8 codes, 16 MiB of MXFP4 codes and 1 MiB of scales."""
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 64 * 1024 * 1024)
  for transform, shape in (
    (Transform.FP8_CODES, (8192, 8192)),
    (Transform.PACK_CODES, (8192, 4096)),
    (Transform.PACK_SCALES, (8192, 256)),
  ):
    cut = leaf(transform, shape, (8192, 8192), "uint8")
    assert [chunk.rows for chunk in chunks.chunks(cut)] == [(0, 4096), (4096, 8192)]


def test_chunks_come_in_the_order_of_the_grid_whatever_the_order_of_the_pieces(monkeypatch):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", LIMIT)
  cut = leaf(Transform.TRANSPOSE, (64, 700), (700, 64), experts=3)
  turned = dataclasses.replace(cut, pieces=cut.pieces[::-1])
  indices = [chunk.index for chunk in chunks.chunks(turned)]
  assert indices == sorted(indices) == [chunk.index for chunk in chunks.chunks(cut)]


@pytest.mark.parametrize("outputs", [701, 163841])
def test_of_a_prime_number_of_outputs_the_last_chunk_has_less(monkeypatch, outputs):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 10_000)
  cut = leaf(Transform.TRANSPOSE, (8, outputs), (outputs, 8))
  *others, last = chunks.chunks(cut)
  assert {chunk.shape for chunk in others} == {chunks.chunk_shape(cut)} == {(8, 625)}
  assert last.shape == (8, outputs % 625)
  assert last.rows == (outputs - outputs % 625, outputs)


def test_what_can_be_cut_evenly_is_unless_the_chunks_would_be_half_as_large(monkeypatch):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 16 * 100)
  assert chunks.chunk_shape(leaf(Transform.RESHAPE, (700, 8), (700, 8))) == (100, 8)
  assert chunks.chunk_shape(leaf(Transform.RESHAPE, (690, 8), (690, 8))) == (69, 8)
  assert chunks.chunk_shape(leaf(Transform.RESHAPE, (2 * 347, 8), (2 * 347, 8))) == (100, 8)


def test_an_array_without_axes_is_one_chunk_and_a_key_names_the_place_in_the_grid():
  scalar = leaf(Transform.RESHAPE, (), ())
  (chunk,) = chunks.chunks(scalar)
  assert (chunk.index, chunk.rows, chunk.shape, chunks.num_chunks(scalar)) == ((), (0, 1), (), 1)
  assert [chunks.key(index) for index in ((), (0,), (3, 0, 11))] == ["c", "c/0", "c/3/0/11"]
