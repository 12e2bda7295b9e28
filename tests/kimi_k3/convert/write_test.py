"""Round trips: what Orbax loads, put through the inverse of each transform, is what the shards hold."""

from __future__ import annotations

import dataclasses
import json
import threading
import weakref

import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from kimi_k3 import checksums
from kimi_k3.convert import chunks, index, output, plan, slices, store, transforms, write
from kimi_k3.convert.plan import Options
from kimi_k3.convert.slices import Slices
from kimi_k3.convert.transforms import Transform
from kimi_k3.errors import InputError

K3_LAYER_9 = "language_model.model.layers.9"  # 0-based; KDA with experts; index 1 of blocks.layers_1


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
  """Stable storage is store_test's; here it would cost half the time."""
  monkeypatch.setattr(store.os, "fsync", lambda _: None)


def written(source, out, *, workers=2, parts=1, **options):
  """The plan of a checkpoint that is written to OUT/0."""
  planned = plan.make_plan(source, Options(**options))
  job = output.Job(commit="rename", workers=workers)
  for part in range(parts, 0, -1) if parts > 1 else ():
    output.convert(out, source, planned, dataclasses.replace(job, part=(part, parts), finish=False))
  output.convert(out, source, planned, dataclasses.replace(job, convert=parts == 1))
  return planned


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


@pytest.mark.parametrize(
  ("experts", "scan"),
  [
    ("as-stored", True),
    ("as-stored", False),
    ("bf16", True),
    pytest.param("bf16", False, marks=pytest.mark.slow),
  ],
)
def test_every_byte_of_k3_comes_back(k3_source, tmp_path, reference, scan, experts):
  planned = written(k3_source, tmp_path / "out", scan=scan, experts=experts)
  seen = check_against_source(planned, loaded(tmp_path / "out" / "0"), k3_source, reference)
  assert seen == {name for name in k3_source.tensors if name.startswith("language_model.")}


@pytest.mark.parametrize("scan", [True, False])
def test_every_byte_of_kimi_linear_comes_back(kimi_linear_source, tmp_path, reference, scan):
  planned = written(kimi_linear_source, tmp_path / "out", scan=scan)
  seen = check_against_source(planned, loaded(tmp_path / "out" / "0"), kimi_linear_source, reference)
  assert seen == set(kimi_linear_source.tensors)


@pytest.mark.parametrize("experts", ["as-stored", "bf16"])
def test_every_byte_comes_back_with_shared_experts_and_latent_packed(all_packed_source, tmp_path, reference, experts):
  planned = written(all_packed_source, tmp_path / "out", experts=experts)
  seen = check_against_source(planned, loaded(tmp_path / "out" / "0"), all_packed_source, reference)
  assert seen == {name for name in all_packed_source.tensors if name.startswith("language_model.")}


def test_leaves_hold_what_the_parameter_tree_says_in_plain_numpy(k3_source, tmp_path):
  written(k3_source, tmp_path / "out", scan=True)
  arrays = {".".join(path): array for path, array in loaded(tmp_path / "out" / "0").items()}
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
  planned = written(kimi_linear_source, tmp_path / "out")
  metadata = ocp.metadata(tmp_path / "out" / "0", checkpointable_name="items").metadata
  tree = ocp.load(tmp_path / "out" / "0", checkpointable_name="items")
  for leaf in planned.leaves:
    described, array = metadata["params"]["params"], tree["params"]["params"]
    for key in leaf.path:
      described, array = described[key], array[key]
    assert tuple(described.shape) == tuple(array.shape) == leaf.shape
    assert described.dtype == array.dtype == leaf.dtype
  embedding = tree["params"]["params"]["token_embedder"]["embedding"]
  assert np.asarray(embedding).tobytes() == kimi_linear_source.read("model.embed_tokens.weight").tobytes()


@pytest.mark.parametrize("how", [{"workers": 1}, {"workers": 3, "parts": 3}, {"sizes": (10_000, 30_000, 6_000)}])
def test_the_arrays_depend_neither_on_workers_nor_on_parts_nor_on_the_sizes_of_chunks_and_slices(
  small_sources, tmp_path, monkeypatch, reference, how
):
  if sizes := how.pop("sizes", None):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", sizes[0])  # A head of 32 KiB is cut by outputs.
    monkeypatch.setattr(slices, "MAX_SLICE_BYTES", sizes[1])
    monkeypatch.setattr(slices, "MIN_SLICE_BYTES", sizes[2])
  planned = written(small_sources["k3"], tmp_path / "out", scan=True, experts="bf16", **how)
  check_against_source(planned, loaded(tmp_path / "out" / "0"), small_sources["k3"], reference)


def test_of_a_prime_vocabulary_the_last_chunk_is_filled_up_and_reads_back(
  tiny_checkpoint, tmp_path, monkeypatch, reference
):
  few = ("--layers", "4", "--set", "num_experts=4", "--set", "num_experts_per_token=2", "--set", "vocab_size=257")
  source = index.open_source(tiny_checkpoint(*few))
  monkeypatch.setattr(chunks, "CHUNK_BYTES", 10_000)
  planned = written(source, tmp_path / "out", scan=False)
  head = next(leaf for leaf in planned.leaves if leaf.path[-2:] == ("logits_dense", "kernel"))
  assert chunks.chunk_shape(head) == (64, 78)
  assert [chunk.shape for chunk in chunks.chunks(head)] == [(64, 78)] * 3 + [(64, 23)]
  arrays = loaded(tmp_path / "out" / "0")
  check_against_source(planned, arrays, source, reference)
  recorded = json.loads((tmp_path / "out" / "conversion.json").read_text())
  name = ".".join(head.path)
  assert recorded["chunks"][name] == [64, 78]
  assert recorded["checksums"][name] == checksums.array_checksum(arrays[head.path], (64, 78))


@pytest.mark.parametrize("sizes", [None, (10_000, 30_000, 6_000)])
def test_the_checksum_of_a_leaf_is_that_of_its_bytes_and_the_shape_of_its_chunks(
  small_sources, tmp_path, monkeypatch, sizes
):
  if sizes:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", sizes[0])
    monkeypatch.setattr(slices, "MAX_SLICE_BYTES", sizes[1])
    monkeypatch.setattr(slices, "MIN_SLICE_BYTES", sizes[2])
  planned = written(small_sources["k3"], tmp_path / "out", scan=True)
  record = json.loads((tmp_path / "out" / "conversion.json").read_text())
  arrays = {".".join(path): array for path, array in loaded(tmp_path / "out" / "0").items()}
  assert list(record["checksums"]) == list(record["chunks"]) == [".".join(leaf.path) for leaf in planned.leaves]
  for name, array in arrays.items():
    assert record["checksums"][name] == checksums.array_checksum(array, record["chunks"][name])


def test_a_leaf_of_zeros_is_stored_all_the_same(k3_source, tmp_path):
  zeros = next(n for n, t in k3_source.tensors.items() if t.dtype == "F32" and n.endswith("e_score_correction_bias"))
  written(reading(k3_source, lambda name, array: array * (name != zeros)), tmp_path / "out")
  tree = json.loads((tmp_path / "out" / "0" / "items" / "_METADATA").read_text())
  assert tree["store_array_data_equal_to_fill_value"]
  assert any(not array.any() for array in loaded(tmp_path / "out" / "0").values())


def reading(source, change) -> index.Source:
  """The source with `change(name, array)` in the place of each array that is read."""

  class Changed(index.Source):
    def read(self, name, start=0, stop=None):
      return change(name, super().read(name, start, stop))

  return Changed(source.directory, source.config, source.config_bytes, source.tensors, source.shards)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's readers, left behind
@pytest.mark.parametrize(
  "name", ["experts.2.w2.weight_packed", pytest.param("embed_tokens.weight", marks=pytest.mark.slow)]
)
def test_a_damaged_byte_is_found_on_reading(k3_source, tmp_path, name):
  written(k3_source, tmp_path / "out")
  stored = next(n for n in k3_source.tensors if n.endswith(name))
  part = k3_source.read(stored).tobytes()[:64]
  (file,) = (f for f in (tmp_path / "out" / "0" / "items" / "d").iterdir() if part in f.read_bytes())
  data = bytearray(file.read_bytes())
  data[data.index(part)] ^= 1
  file.write_bytes(data)
  with pytest.raises(ValueError, match="Digest mismatch"):
    loaded(tmp_path / "out" / "0")


def test_an_array_is_described_as_tensorstore_itself_describes_it(small_sources):
  """So that another writer may open it, and no reader meets a field it does not know."""
  leaf = plan.make_plan(small_sources["k3"], Options()).leaves[0]
  context = ts.Context()
  metadata = {"shape": leaf.shape, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.shape}}}
  spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata | {"data_type": leaf.dtype}}
  ts.open(spec, create=True, context=context).result()
  theirs = ts.KvStore.open("memory://", context=context).result()
  stored = json.loads(theirs.read("zarr.json").result().value)
  ours = json.loads(write.array_metadata(leaf))
  assert ours.pop("codecs") == [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
  assert ours == {name: value for name, value in stored.items() if name != "codecs"}


def test_orbax_finds_no_time_in_what_describes_a_checkpoint():
  described = json.loads(write.checkpoint_metadata({"scan_layers": True}))
  assert described["init_timestamp_nsecs"] == described["commit_timestamp_nsecs"] == 1
  assert described["custom_metadata"] == {"scan_layers": True}
  assert described["item_handlers"]["items"].endswith("PyTreeHandler")


def test_a_slice_is_its_chunks_each_with_its_checksum_and_holds_one_at_a_time(small_sources):
  source = small_sources["k3"]
  work = Slices(plan.make_plan(source, Options(experts="bf16")).leaves, source.tensors)
  for number in range(len(work)):
    sums: list[int] = []
    at, before = 0, None
    placed = list(work.chunks(number))
    for i, part in enumerate(write.slice_parts(work, number, source, sums)):
      if i % 2:
        assert part == sums[-1].to_bytes(4, "little")
        at += 4
      else:
        assert before is None or before() is None  # the chunk before is let go
        assert (at, len(sums)) == (placed[i // 2].offset, i // 2 + 1)
        assert checksums.chunk_checksum(part) == sums[-1]
        before, at = weakref.ref(part), at + len(part)
      del part
    assert at == work.size(number)
    assert len(sums) == len(placed)


# Running the slices


def test_tasks_are_begun_in_their_order_and_all_of_them():
  begun, lock = [], threading.Lock()

  def work(task):
    with lock:
      begun.append(task)

  write.run_all(range(50), work, 1)
  assert begun == list(range(50))
  write.run_all(range(50), work, 4)
  assert sorted(begun[50:]) == list(range(50))
  write.run_all([], work, 2)


def test_the_first_error_stops_all_workers_and_is_the_one_raised(k3_source, tmp_path):
  reads, lock = [], threading.Lock()

  def fail(name, array):
    with lock:
      reads.append(name)
      if len(reads) == 20:
        raise InputError("the twentieth read fails")
    return array

  with pytest.raises(InputError, match=r"^the twentieth read fails$"):
    written(reading(k3_source, fail), tmp_path / "out")
  assert len(reads) < len(k3_source.tensors) / 2


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interruption_lets_the_tasks_under_way_end_and_begins_no_other(monkeypatch, workers):
  begun, ended, lock, started = [], [], threading.Lock(), threading.Barrier(workers + 1)

  def work(task):
    with lock:
      begun.append(task)
    started.wait(10)
    with lock:
      ended.append(task)

  def interrupt(_):
    started.wait(10)  # All workers are at it.
    raise KeyboardInterrupt

  monkeypatch.setattr(write.concurrent.futures, "as_completed", interrupt)
  with pytest.raises(KeyboardInterrupt):
    write.run_all(range(100), work, workers)
  assert sorted(begun) == sorted(ended)
  assert len(begun) <= 2 * workers
