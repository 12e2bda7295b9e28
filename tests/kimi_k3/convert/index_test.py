from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kimi_k3.convert import index
from kimi_k3.errors import InputError

SHARD = "model-00002-of-000003.safetensors"


def rewrite_header(path, edit) -> None:
  """Replaces a shard's header by edit(header), which may be bytes; the data stays."""
  data = path.read_bytes()
  length = int.from_bytes(data[:8], "little")
  header = edit(json.loads(data[8 : 8 + length]))
  header = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def edit_index(directory, edit) -> None:
  path = directory / index.INDEX_FILE
  content = json.loads(path.read_text())
  edit(content["weight_map"])
  path.write_text(json.dumps(content))


def test_every_tensor_reads_back_as_safetensors_reads_it(k3_source):
  for shard in sorted({tensor.shard for tensor in k3_source.tensors.values()}):
    for name, expected in load_file(k3_source.directory / shard).items():
      found = k3_source.read(name)
      assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_checkpoint_without_an_index_is_read_from_all_its_files(tmp_path, shards):
  (tmp_path / "config.json").write_text("{}")
  for i in range(shards):
    save_file({f"tensor_{i}": np.arange(6, dtype=np.float32).reshape(2, 3) + i}, tmp_path / f"{i}.safetensors")
  with index.open_source(tmp_path) as source:
    assert sorted(source.tensors) == [f"tensor_{i}" for i in range(shards)]
    assert source.read("tensor_0")[1, 2] == 5


def test_links_to_the_files_are_followed_as_in_a_hugging_face_cache(k3_copy, tmp_path):
  blob = tmp_path / "blob"
  (k3_copy / SHARD).rename(blob)
  (k3_copy / SHARD).symlink_to(blob)
  assert len(index.open_source(k3_copy).tensors) == 1504


@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_a_missing_file_is_named(k3_copy, name):
  (k3_copy / name).unlink()
  with pytest.raises(InputError, match=name):
    index.open_source(k3_copy)


def test_a_missing_directory_and_one_without_tensors_are_refused(k3_copy, tmp_path):
  with pytest.raises(InputError, match="no such directory"):
    index.open_source(tmp_path / "nowhere")
  for path in k3_copy.glob("model*"):
    path.unlink()
  with pytest.raises(InputError, match="neither"):
    index.open_source(k3_copy)


@pytest.mark.parametrize("name", ["config.json", index.INDEX_FILE])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_broken_json_is_named(k3_copy, name, content):
  (k3_copy / name).write_bytes(content)
  with pytest.raises(InputError, match=name):
    index.open_source(k3_copy)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_weight_map_is_refused(k3_copy, content):
  (k3_copy / index.INDEX_FILE).write_text(content)
  with pytest.raises(InputError, match="weight_map"):
    index.open_source(k3_copy)


@pytest.mark.parametrize(
  "shard", ["../outside.safetensors", "a/../../outside.safetensors", "{absolute}", "link/x", "", "."]
)
def test_a_shard_outside_the_directory_is_refused_before_it_is_opened(k3_copy, tmp_path, shard):
  shutil.copy(k3_copy / SHARD, tmp_path / "outside.safetensors")
  (k3_copy / "link").symlink_to(tmp_path)
  shard = shard.format(absolute=tmp_path / "outside.safetensors")
  edit_index(k3_copy, lambda weights: weights.update({name: shard for name in weights if weights[name] == SHARD}))
  with pytest.raises(InputError, match="outside the checkpoint directory"):
    index.open_source(k3_copy)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -4096])
def test_a_truncated_shard_is_refused_with_the_declared_and_the_actual_size(k3_copy, keep):
  data = (k3_copy / SHARD).read_bytes()
  (k3_copy / SHARD).write_bytes(data[:keep])
  with pytest.raises(InputError, match=rf"{SHARD}: .*\d+ (bytes )?declared.*the file has {len(data[:keep])}\b"):
    index.open_source(k3_copy)


def test_trailing_garbage_is_refused(k3_copy):
  with (k3_copy / SHARD).open("ab") as file:
    file.write(b"\0")
  with pytest.raises(InputError, match="something was appended"):
    index.open_source(k3_copy)


@pytest.mark.parametrize("header", [b"", b"garbage!", b"[1, 2]", b'{"a": 1, "a": 2}'])
def test_a_header_that_is_no_header_is_refused(k3_copy, header):
  rewrite_header(k3_copy / SHARD, lambda _: header)
  with pytest.raises(InputError, match=SHARD):
    index.open_source(k3_copy)


def test_a_header_longer_than_the_file_or_the_format_allows_is_refused(k3_copy):
  data = (k3_copy / SHARD).read_bytes()
  (k3_copy / SHARD).write_bytes((2**63).to_bytes(8, "little") + data[8:])
  with pytest.raises(InputError, match="header of 9223372036854775808 bytes"):
    index.open_source(k3_copy)


def _first(header):
  return next(name for name in header if name != "__metadata__")


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("dtype", "Q7", "unknown dtype 'Q7'"),
    ("dtype", "F64", "bytes declared"),
    ("dtype", ["F32"], "unknown dtype"),
    ("shape", [3, 5, 7], "bytes declared"),
    ("shape", [-1, -2], "lists of sizes"),
    ("shape", [True], "lists of sizes"),
    ("data_offsets", [0], "lists of sizes"),
    ("data_offsets", [8, 0], "bytes declared"),
  ],
)
def test_a_wrong_entry_of_a_header_is_named(k3_copy, field, value, message):
  names = []

  def edit(header):
    names.append(_first(header))
    header[names[0]][field] = value
    return header

  rewrite_header(k3_copy / SHARD, edit)
  with pytest.raises(InputError, match=message) as error:
    index.open_source(k3_copy)
  assert names[0] in str(error.value)


@pytest.mark.parametrize(("shift", "message"), [(4, "a gap of 4"), (-4, "an overlap of 4")])
def test_tensors_that_do_not_tile_the_file_are_named(k3_copy, shift, message):
  def edit(header):
    by_offset = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    for name in by_offset[3:]:
      header[name]["data_offsets"] = [at + shift for at in header[name]["data_offsets"]]
    return header

  rewrite_header(k3_copy / SHARD, edit)
  with pytest.raises(InputError, match=message):
    index.open_source(k3_copy)


def test_index_and_shards_must_agree_and_every_disagreement_is_named(k3_copy, k3_source):
  here = [name for name, tensor in k3_source.tensors.items() if tensor.shard == SHARD]

  def edit(weights):
    del weights[here[0]]
    weights["nobody.weight"] = SHARD
    weights[here[1]] = "model-00001-of-000003.safetensors"

  edit_index(k3_copy, edit)
  with pytest.raises(InputError) as error:
    index.open_source(k3_copy)
  message = str(error.value)
  assert f"{here[0]}: in {SHARD}, but not in the index" in message
  assert f"nobody.weight: in the index, but not in {SHARD}" in message
  assert f"{here[1]}: the index says model-00001-of-000003.safetensors, found in {SHARD}" in message


def test_a_file_that_the_index_does_not_name_is_refused(k3_copy):
  save_file({"extra": np.zeros(1, np.float32)}, k3_copy / "extra.safetensors")
  with pytest.raises(InputError, match=r"extra\.safetensors: not named by the index"):
    index.open_source(k3_copy)


def test_a_tensor_in_two_shards_is_named(k3_copy):
  (k3_copy / index.INDEX_FILE).unlink()
  shutil.copy(k3_copy / SHARD, k3_copy / "copy.safetensors")
  with pytest.raises(InputError, match=rf"stored in copy.safetensors and in {SHARD}.*and \d+ more"):
    index.open_source(k3_copy)


def test_all_faulty_shards_are_named_on_one_line(k3_copy):
  for path in k3_copy.glob("*.safetensors"):
    path.write_bytes(b"x")
  with pytest.raises(InputError) as error:
    index.open_source(k3_copy)
  assert all(f"model-0000{i}-of-000003.safetensors" in str(error.value) for i in (1, 2, 3))
  assert "\n" not in str(error.value)


def test_a_shard_that_shrinks_after_opening_is_an_error_not_garbage(k3_copy):
  with index.open_source(k3_copy) as source:
    name = max((t for t in source.tensors.values() if t.shard == SHARD), key=lambda t: t.offset).name
    (k3_copy / SHARD).write_bytes(b"")
    with pytest.raises(InputError, match="was the file changed"):
      source.read(name)
