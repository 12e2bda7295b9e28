"""Chunks and slices at the full size of K3, by names and shapes alone, and of the golden checkpoints."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
import yaml

from kimi_k3.checksums import CHECKSUM_BYTES
from kimi_k3.config import KimiK3Config
from kimi_k3.convert import chunks, mapping, plan, slices
from kimi_k3.convert.index import DTYPES, StoredTensor
from kimi_k3.convert.mapping import Leaf, Piece
from kimi_k3.convert.plan import Options
from kimi_k3.convert.slices import Slices
from kimi_k3.convert.transforms import Transform
from kimi_k3.maxtext_keys import from_maxtext
from kimi_k3.resources import configs_dir

MIB = 1024 * 1024
SHARD_BYTES = 16_300_000_000  # as the release has them: 96 files
# The scales of FP8 are one chunk: small, and made from a few rows at a time.
WHOLE_HOWEVER_LARGE = (Transform.FP8_SCALES,)
FORMS = {
  "as-stored": {},
  "bf16": {"packed_modules": ()},
  "fp8-block": {"packed_modules": (), "fp8_modules": ("dense", "experts")},
}
PART_COUNTS = (1, 2, 3, 7, 1000)


class FullSize(NamedTuple):
  """K3 with all its sizes but maybe the number of experts."""

  num_experts: int
  config: KimiK3Config
  leaves: tuple[Leaf, ...]
  tensors: dict[str, StoredTensor]


def placed(leaves: tuple[Leaf, ...]) -> dict[str, StoredTensor]:
  """Every stored tensor, laid out layer by layer and by names in files of the release's size."""
  stored = {
    name: described
    for leaf in leaves
    for piece in leaf.pieces
    for name, described in zip(piece.names, leaf.stored, strict=True)
  }
  layer = {name: int(parts[3]) if (parts := name.split("."))[2] == "layers" else 99 for name in stored}
  tensors, shard, offset = {}, 1, 0
  for name in sorted(stored, key=lambda name: (layer[name], name)):
    dtype, shape = stored[name]
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offset + nbytes > SHARD_BYTES:
      shard, offset = shard + 1, 0
    tensors[name] = StoredTensor(name, dtype, shape, f"model-{shard:05d}-of-000096.safetensors", offset, nbytes)
    offset += nbytes
  return tensors


@pytest.fixture(scope="module", params=[28, pytest.param(896, marks=pytest.mark.slow)])
def k3(request) -> FullSize:
  """28 of the 896 experts make the same chunks, and half a million tensors take half a minute."""
  config = from_maxtext(yaml.safe_load((configs_dir() / "models" / "kimi-k3.yml").read_text()))
  config = dataclasses.replace(config, num_experts=request.param)
  form = mapping.StoredForm(prefix="language_model.", packed_modules=("experts",), a_log_shape=(128,))
  leaves = mapping.leaves(config, form, scan=True)
  return FullSize(request.param, config, leaves, placed(leaves))


@pytest.fixture(scope="module")
def work(k3) -> Slices:
  return Slices(k3.leaves, k3.tensors)


def leaves_of(k3: FullSize, form: str, *, scan: bool) -> tuple[Leaf, ...]:
  stored = mapping.StoredForm(prefix="language_model.", packed_modules=("experts",), a_log_shape=(128,))
  return mapping.leaves(dataclasses.replace(k3.config, **FORMS[form]), stored, scan=scan)


def test_the_table_is_the_release(k3):
  expected = {28: None, 896: 497_220 - 168}[k3.num_experts]
  assert expected in (None, len(k3.tensors))
  assert max(t.shard for t in k3.tensors.values()) <= "model-00096-of-000096.safetensors"


@pytest.mark.parametrize("form", FORMS)
def test_at_full_size_a_chunk_has_at_most_32_mib_and_is_made_of_no_more(k3, form):
  for leaf in leaves_of(k3, form, scan=True):
    if leaf.transform in WHOLE_HOWEVER_LARGE:
      continue
    shape = chunks.chunk_shape(leaf)
    assert math.prod(shape) * np.dtype(leaf.dtype).itemsize <= 32 * MIB, leaf.path
    for chunk in chunks.piece_chunks(leaf, leaf.pieces[0]):
      rows = chunk.rows[1] - chunk.rows[0]
      stored = [rows * math.prod(s[1:]) * DTYPES[dtype].itemsize for dtype, s in leaf.stored]
      # Of codes and scales the codes are a quarter of what they are decoded to.
      assert sum(stored) <= 32 * MIB, leaf.path


@pytest.mark.parametrize("form", FORMS)
def test_at_full_size_the_chunks_of_a_leaf_tile_it_and_its_stored_rows(k3, form):
  for leaf in leaves_of(k3, form, scan=True):
    piece, step = leaf.pieces[-1], chunks.chunk_shape(leaf)
    grid = [-(-size // chunk) for size, chunk in zip(leaf.shape, step, strict=True)]
    assert chunks.num_chunks(leaf) == math.prod(grid)
    found = list(chunks.piece_chunks(leaf, piece))
    assert len(found) * len(leaf.pieces) == chunks.num_chunks(leaf), leaf.path
    at = 0
    for number, chunk in enumerate(found):
      assert chunk.piece is piece
      assert chunk.rows[0] == at < chunk.rows[1]
      at = chunk.rows[1]
      rest = [min(s, size - i * s) for i, s, size in zip(chunk.index, step, leaf.shape, strict=True)]
      assert chunk.shape == tuple(rest)
      assert chunk.index[: len(piece.index)] == piece.index
      (cut,) = {i for i in chunk.index[len(piece.index) :] if i} or {0}
      assert cut == number
    assert at == (leaf.stored[0][1] or (1,))[0], leaf.path


def test_at_full_size_devices_read_whole_heads_and_experts(k3):
  shapes = {".".join(leaf.path): chunks.chunk_shape(leaf) for leaf in k3.leaves}
  inner = "decoder.blocks.layers_0"
  assert shapes[f"{inner}.mlp.experts.w1_packed"] == (1, 1, 3072, 1792)
  assert shapes[f"{inner}.attention.q_proj.kernel"] == (1, 7168, 8, 128)
  assert shapes[f"{inner}.attention.o_proj.kernel"] == (1, 96, 128, 512)
  assert shapes["token_embedder.embedding"] == (1024, 7168)
  assert shapes["decoder.logits_dense.kernel"] == (7168, 1024)
  assert shapes[f"{inner}.input_norm.scale"] == (1, 7168)


def test_at_full_size_slices_hold_every_chunk_once_in_at_most_64_mib(k3, work):
  expected = collections.Counter(dict(enumerate(map(chunks.num_chunks, k3.leaves))))
  assert collections.Counter(work._order[:, 0].tolist()) == expected
  assert len(np.unique(work._order, axis=0)) == work.num_chunks == expected.total()
  sizes = [work.size(number) for number in range(len(work))]
  assert max(sizes) <= 64 * MIB
  assert sum(sizes) == work.nbytes == sum(map(plan.leaf_bytes, k3.leaves)) + CHECKSUM_BYTES * work.num_chunks
  assert work._bounds[0] == 0 and work._bounds[-1] == work.num_chunks
  assert all(first < last for first, last in zip(work._bounds, work._bounds[1:], strict=False))


def test_at_full_size_slices_go_through_the_source_once(k3, work):
  """Chunk after chunk starts behind the one before, in the same shard or the next; and few slices need two shards."""
  before, two = ("", 0), 0
  for number in range(0, len(work), max(1, len(work) // 300)):
    for item in work.chunks(number):
      leaf, chunk = k3.leaves[item.leaf], item.chunk
      tensor = k3.tensors[chunk.piece.names[-1]]  # of codes and scales the leaf of scales reads the scales
      here = (tensor.shard, tensor.offset + chunk.rows[0] * (tensor.nbytes // (tensor.shape or (1,))[0]))
      assert here > before, leaf.path
      before = here
    two += len(work.shards(number)) > 1
  assert two < 10  # of some 300: there are 96 shards, and 24,000 slices


def test_at_full_size_the_chunks_of_a_slice_lie_one_after_the_other(k3, work):
  for number in (0, len(work) // 2, len(work) - 1):
    at = 0
    for item in work.chunks(number):
      size = math.prod(chunks.chunk_shape(k3.leaves[item.leaf])) * np.dtype(k3.leaves[item.leaf].dtype).itemsize
      assert (item.offset, item.nbytes) == (at, size + CHECKSUM_BYTES)
      at += item.nbytes
    assert at == work.size(number)


@pytest.mark.parametrize("count", PART_COUNTS)
def test_at_full_size_parts_are_disjoint_complete_and_of_near_equal_size(work, count):
  parts = [work.part(number, count) for number in range(1, count + 1)]
  assert [n for part in parts for n in part] == list(range(len(work)))
  sizes = [sum(map(work.size, part)) for part in parts]
  # Each bound is moved by less than a slice.
  assert all(abs(size - work.nbytes / count) <= 64 * MIB for size in sizes)


def test_more_parts_than_slices_are_complete_too(small_sources):
  source = small_sources["k3"]
  work = Slices(plan.make_plan(source, Options()).leaves, source.tensors)
  assert len(work) < 50
  for count in (1, 2, 3, 7, 50, 400):
    parts = [work.part(number, count) for number in range(1, count + 1)]
    assert [n for part in parts for n in part] == list(range(len(work)))


@pytest.mark.parametrize("sizes", [(32 * MIB, 64 * MIB, 64 * 1024), (10_000, 30_000, 6_000), (1_000, 2_000, 1)])
@pytest.mark.parametrize("name", ["k3", "kimi-linear", "all packed"])
def test_whatever_the_sizes_slices_hold_every_chunk_once(small_sources, monkeypatch, name, sizes):
  monkeypatch.setattr(chunks, "CHUNK_BYTES", sizes[0])
  monkeypatch.setattr(slices, "MAX_SLICE_BYTES", sizes[1])
  monkeypatch.setattr(slices, "MIN_SLICE_BYTES", sizes[2])
  source = small_sources[name]
  leaves = plan.make_plan(source, Options()).leaves
  work = Slices(leaves, source.tensors)
  items = [item for number in range(len(work)) for item in work.chunks(number)]
  assert len(items) == work.num_chunks == sum(map(chunks.num_chunks, leaves))
  found = collections.defaultdict(set)
  for item in items:
    found[item.leaf].add(item.chunk)
  assert all(found[number] == set(chunks.chunks(leaf)) for number, leaf in enumerate(leaves))
  assert sum(map(work.size, range(len(work)))) == work.nbytes


def test_the_same_plan_is_cut_the_same_way(small_sources):
  source = small_sources["k3"]
  first, second = (Slices(plan.make_plan(source, Options()).leaves, source.tensors) for _ in range(2))
  assert [list(first.chunks(n)) for n in range(len(first))] == [list(second.chunks(n)) for n in range(len(second))]


def test_a_slice_names_every_shard_it_is_made_from():
  """Scales are checked by the codes beside them, which another file may hold."""
  stored = (("U8", (4, 16)), ("U8", (4, 1)))
  leaf = Leaf(("scale",), (4, 1), "uint8", Transform.SCALES, stored, (Piece((), ("codes", "scales")),))
  tensors = {
    "codes": StoredTensor("codes", "U8", (4, 16), "b.safetensors", 0, 64),
    "scales": StoredTensor("scales", "U8", (4, 1), "a.safetensors", 0, 4),
  }
  work = Slices((leaf,), tensors)
  assert (len(work), work.shards(0)) == (1, ["a.safetensors", "b.safetensors"])


def test_a_chunk_larger_than_a_slice_is_a_slice_alone(monkeypatch):
  monkeypatch.setattr(slices, "MAX_SLICE_BYTES", 100)
  monkeypatch.setattr(slices, "MIN_SLICE_BYTES", 1)
  tensors = {name: StoredTensor(name, "U8", (size,), "s", 0, size) for name, size in (("a", 10), ("b", 500), ("c", 10))}
  leaves = tuple(
    Leaf((name,), t.shape, "uint8", Transform.RESHAPE, (("U8", t.shape),), (Piece((), (name,)),))
    for name, t in tensors.items()
  )
  work = Slices(leaves, tensors)
  assert [work.size(number) for number in range(len(work))] == [14, 504, 14]


def test_data_files_have_their_number_for_a_name():
  assert slices.file_name(12) == "d/000012"
