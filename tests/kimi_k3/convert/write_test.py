"""Round trips: what Orbax loads, put through the inverse of each transform, is what the shards hold."""

from __future__ import annotations

import json
import math
import shutil
import threading
import zlib

import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest
from orbax.checkpoint import v1 as ocp

from kimi_k3.convert import index, plan, transforms, write
from kimi_k3.convert.mapping import Leaf, Piece
from kimi_k3.convert.plan import Options
from kimi_k3.convert.transforms import Transform
from kimi_k3.errors import InputError

K3_LAYER_9 = "language_model.model.layers.9"  # 0-based; KDA with experts; index 1 of blocks.layers_1


def written(source, directory, *, workers=2, **options):
  """The plan of a checkpoint that is written to the directory."""
  return written_with_checksums(source, directory, workers=workers, **options)[0]


def written_with_checksums(source, directory, *, workers=2, **options):
  planned = plan.make_plan(source, Options(**options))
  directory.mkdir()
  quiet = {"workers": workers, "progress": lambda _: None}
  return planned, write.write_checkpoint(directory, source, planned.leaves, scan=planned.scan, **quiet)


def loaded(directory) -> dict[tuple[str, ...], np.ndarray]:
  """Every leaf that Orbax finds, by path below params.params."""
  tree = orbax.checkpoint.PyTreeCheckpointer().restore(directory / "items")
  leaves = {}

  def walk(path, node):
    if isinstance(node, dict):
      for key, child in node.items():
        walk((*path, key), child)
    else:
      leaves[path] = np.asarray(node)

  assert set(tree) == {"params"}
  assert set(tree["params"]) == {"params"}
  walk((), tree["params"]["params"])
  return leaves


def check_against_source(planned, arrays, source, reference) -> set[str]:
  """Compares every piece of every leaf with the stored bytes; returns the names of the tensors that were compared."""
  assert set(arrays) == {leaf.path for leaf in planned.leaves}
  seen = set()
  for leaf in planned.leaves:
    array = arrays[leaf.path]
    assert (array.shape, str(array.dtype)) == (leaf.shape, leaf.dtype)
    for piece in leaf.pieces:
      part, stored = array[piece.index], [source.read(name) for name in piece.names]
      if leaf.transform is Transform.DECODE:
        assert part.tobytes() == reference.mxfp4_decode(*stored).T.astype(ml_dtypes.bfloat16).tobytes()
        seen |= set(piece.names)
      else:
        back = transforms.invert(leaf.transform, part, stored[-1].shape)
        assert (back.dtype, back.shape, back.tobytes()) == (stored[-1].dtype, stored[-1].shape, stored[-1].tobytes())
        seen.add(piece.names[-1])
  return seen


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("experts", ["as-stored", "bf16"])
def test_every_byte_of_k3_comes_back(k3_source, tmp_path, reference, scan, experts):
  planned = written(k3_source, tmp_path / "0", scan=scan, experts=experts)
  seen = check_against_source(planned, loaded(tmp_path / "0"), k3_source, reference)
  assert seen == {name for name in k3_source.tensors if name.startswith("language_model.")}


@pytest.mark.parametrize("scan", [True, False])
def test_every_byte_of_kimi_linear_comes_back(kimi_linear_source, tmp_path, reference, scan):
  planned = written(kimi_linear_source, tmp_path / "0", scan=scan)
  seen = check_against_source(planned, loaded(tmp_path / "0"), kimi_linear_source, reference)
  assert seen == set(kimi_linear_source.tensors)


@pytest.mark.parametrize("experts", ["as-stored", "bf16"])
def test_every_byte_comes_back_with_shared_experts_and_latent_packed(all_packed_source, tmp_path, reference, experts):
  planned = written(all_packed_source, tmp_path / "0", experts=experts)
  seen = check_against_source(planned, loaded(tmp_path / "0"), all_packed_source, reference)
  assert seen == {name for name in all_packed_source.tensors if name.startswith("language_model.")}


def test_leaves_hold_what_the_parameter_tree_says_in_plain_numpy(k3_source, tmp_path):
  written(k3_source, tmp_path / "0", scan=True)
  arrays = {".".join(path): array for path, array in loaded(tmp_path / "0").items()}
  kda, moe = f"{K3_LAYER_9}.self_attn", f"{K3_LAYER_9}.block_sparse_moe"
  block = {
    path.removeprefix("decoder.blocks.layers_1."): array[1] for path, array in arrays.items() if "s.layers_1." in path
  }
  q, conv, out = (k3_source.read(f"{kda}.{name}.weight") for name in ("q_proj", "q_conv1d", "o_proj"))
  for head in range(4):
    rows = slice(32 * head, 32 * (head + 1))
    assert np.array_equal(block["attention.q_proj.kernel"][:, head], q[rows].T)
    assert np.array_equal(block["attention.q_conv"][:, head], conv[rows, 0].T)
    assert np.array_equal(block["attention.o_proj.kernel"][head], out[:, rows].T)
  assert np.array_equal(block["attention.A_log"], k3_source.read(f"{kda}.A_log")[:4])
  assert np.array_equal(block["attention.dt_bias"].ravel(), k3_source.read(f"{kda}.dt_bias"))
  assert np.array_equal(block["mlp.router.kernel"], k3_source.read(f"{moe}.gate.weight").T)
  for name in ("packed", "scale"):
    assert np.array_equal(block[f"mlp.experts.w2_{name}"][11], k3_source.read(f"{moe}.experts.11.w2.weight_{name}"))
  assert np.array_equal(arrays["decoder.logits_dense.kernel"], k3_source.read("language_model.lm_head.weight").T)


def test_the_loader_that_maxtext_uses_reads_shapes_and_values(kimi_linear_source, tmp_path):
  planned = written(kimi_linear_source, tmp_path / "0")
  metadata = ocp.metadata(tmp_path / "0", checkpointable_name="items").metadata
  tree = ocp.load(tmp_path / "0", checkpointable_name="items")
  for leaf in planned.leaves:
    described, array = metadata["params"]["params"], tree["params"]["params"]
    for key in leaf.path:
      described, array = described[key], array[key]
    assert tuple(described.shape) == tuple(array.shape) == leaf.shape
    assert described.dtype == array.dtype == leaf.dtype
  embedding = tree["params"]["params"]["token_embedder"]["embedding"]
  assert np.asarray(embedding).tobytes() == kimi_linear_source.read("model.embed_tokens.weight").tobytes()


def test_the_result_depends_neither_on_workers_nor_on_chunk_sizes(small_sources, tmp_path, monkeypatch, reference):
  monkeypatch.setattr(write, "CHUNK_BYTES", 10_000)  # A head of 32 KiB is cut into rows.
  monkeypatch.setattr(write, "RUN_BYTES", 6_000)  # Experts of 2 KiB go in pairs, small leaves in many groups.
  planned = written(small_sources["k3"], tmp_path / "0", workers=1, scan=True, experts="bf16")
  check_against_source(planned, loaded(tmp_path / "0"), small_sources["k3"], reference)


@pytest.mark.parametrize("sizes", [None, (10_000, 6_000)])
def test_the_checksum_of_a_leaf_is_that_of_its_bytes_however_it_was_cut(small_sources, tmp_path, monkeypatch, sizes):
  if sizes:
    monkeypatch.setattr(write, "CHUNK_BYTES", sizes[0])
    monkeypatch.setattr(write, "RUN_BYTES", sizes[1])
  planned, sums = written_with_checksums(small_sources["k3"], tmp_path / "0", scan=True)
  arrays = loaded(tmp_path / "0")
  assert list(sums) == [".".join(leaf.path) for leaf in planned.leaves]
  assert sums == {".".join(path): f"{zlib.crc32(array.tobytes()):08x}" for path, array in arrays.items()}


def test_a_leaf_of_zeros_is_stored_all_the_same(k3_source, tmp_path):
  zeros = next(n for n, t in k3_source.tensors.items() if t.dtype == "F32" and n.endswith("e_score_correction_bias"))

  class Zeroed(index.Source):
    def read(self, name):
      return super().read(name) * (name != zeros)

  written(Zeroed(k3_source.directory, k3_source.config, k3_source.config_bytes, k3_source.tensors), tmp_path / "0")
  tree = json.loads((tmp_path / "0" / "items" / "_METADATA").read_text())
  assert tree["store_array_data_equal_to_fill_value"]
  assert any(not array.any() for array in loaded(tmp_path / "0").values())


def leaf_of(shape, dtype, indices):
  return Leaf(("x",), shape, dtype, Transform.RESHAPE, (("U8", ()),), tuple(Piece(i, (f"{i}",)) for i in indices))


@pytest.mark.parametrize(
  ("leaf", "chunk"),
  [
    (leaf_of((22, 896, 3072, 1792), "uint8", [(b, e) for b in range(22) for e in range(896)]), [1, 1, 3072, 1792]),
    (leaf_of((22, 7168, 96, 128), "bfloat16", [(b,) for b in range(22)]), [1, 7168, 96, 128]),
    (leaf_of((7168, 163840), "bfloat16", [()]), [819, 163840]),
    (leaf_of((7168,), "bfloat16", [()]), [7168]),
  ],
  ids=["experts", "stacked", "head", "vector"],
)
def test_a_chunk_is_one_block_or_expert_and_at_most_256_mib(leaf, chunk):
  assert write._chunk_shape(leaf) == chunk
  assert math.prod(chunk) * np.dtype(leaf.dtype).itemsize <= write.CHUNK_BYTES


def test_runs_stay_in_one_block_and_below_their_limit():
  leaf = leaf_of((2, 896, 3072, 1792), "uint8", [(b, e) for b in range(2) for e in range(896)])
  runs = list(write._runs(leaf))
  assert [piece for run in runs for piece in run] == list(leaf.pieces)
  assert all(len({piece.index[0] for piece in run}) == 1 for run in runs)
  assert max(len(run) for run in runs) == 24  # 24 x 5.25 MiB


def test_the_first_error_stops_all_workers_and_is_the_one_raised(k3_source, tmp_path):
  reads, lock = [], threading.Lock()

  class Failing(index.Source):
    def read(self, name):
      with lock:
        reads.append(name)
        if len(reads) == 20:
          raise InputError("the twentieth read fails")
      return super().read(name)

  source = Failing(k3_source.directory, k3_source.config, k3_source.config_bytes, k3_source.tensors)
  with pytest.raises(InputError, match="the twentieth read fails"):
    written(source, tmp_path / "0")
  assert len(reads) < len(k3_source.tensors) / 2


def test_a_disk_that_takes_no_more_is_told_in_one_line(k3_source, tmp_path):
  class Ruining(index.Source):
    def read(self, name):
      shutil.rmtree(tmp_path / "0" / "items" / "d", ignore_errors=True)
      shutil.rmtree(tmp_path / "0" / "items", ignore_errors=True)
      (tmp_path / "0" / "items").touch()  # nothing can be created below a file
      return super().read(name)

  source = Ruining(k3_source.directory, k3_source.config, k3_source.config_bytes, k3_source.tensors)
  with pytest.raises(InputError, match=r"the checkpoint cannot be written, is the disk full\? \.\.\.") as error:
    written(source, tmp_path / "0", workers=1)
  assert "\n" not in str(error.value)
  assert len(str(error.value)) < 300


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's readers, left behind
@pytest.mark.parametrize("name", ["embed_tokens.weight", "experts.2.w2.weight_packed"])
def test_a_damaged_byte_is_found_on_reading(k3_source, tmp_path, name):
  written(k3_source, tmp_path / "0")
  stored = next(n for n in k3_source.tensors if n.endswith(name))
  part = k3_source.read(stored).tobytes()[:64]
  (file,) = (f for f in (tmp_path / "0" / "items" / "d").iterdir() if part in f.read_bytes())
  data = bytearray(file.read_bytes())
  data[data.index(part)] ^= 1
  file.write_bytes(data)
  with pytest.raises(ValueError, match="Digest mismatch"):
    loaded(tmp_path / "0")
