from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

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


def test_rows_and_blocks_of_a_tensor_are_its_bytes(k3_source):
  name = "language_model.model.embed_tokens.weight"
  whole = k3_source.read(name)
  assert np.array_equal(k3_source.read(name, 3, 9), whole[3:9])
  blocks = [bytes(block) for block in k3_source.blocks(name, 1_000)]
  assert [len(block) for block in blocks[:2]] == [1_000, 1_000]
  assert b"".join(blocks) == whole.tobytes()


def test_a_hugging_face_cache_is_read_through_its_links(k3_tiny, tmp_path):
  blobs, snapshot = tmp_path / "models" / "blobs", tmp_path / "models" / "snapshots" / "0a1b"
  blobs.mkdir(parents=True)
  snapshot.mkdir(parents=True)
  for i, path in enumerate(sorted(k3_tiny.checkpoint.iterdir())):
    shutil.copy(path, blobs / f"{i:064x}")
    (snapshot / path.name).symlink_to(f"../../blobs/{i:064x}")
  with index.open_source(snapshot) as source:
    assert len(source.tensors) == 1504
    assert source.read("language_model.model.norm.weight").shape == (64,)


@pytest.mark.parametrize("shard", ["sub/{}", "./{}", "sub/../{}", "{}/", "a\nb", "\x1b[2J", "\ud800"])
def test_a_shard_with_a_path_or_a_name_nobody_can_print_is_refused(k3_copy, shard):
  (k3_copy / "sub").mkdir()
  shutil.copy(k3_copy / SHARD, k3_copy / "sub" / SHARD)
  edit_index(k3_copy, lambda weights: weights.update(dict.fromkeys(weights, shard.format(SHARD))))
  with pytest.raises(InputError, match="expected plain names of shards") as error:
    index.open_source(k3_copy)
  assert str(error.value).isprintable()


def test_a_directory_in_the_place_of_a_file_is_named(k3_copy):
  for name in (SHARD, index.INDEX_FILE, "config.json"):
    (k3_copy / name).unlink()
    (k3_copy / name).mkdir()
    with pytest.raises(InputError, match=rf"{name}: cannot be read \(a directory, expected a file\)"):
      index.open_source(k3_copy)


def test_a_file_without_permission_is_named(k3_copy, monkeypatch):
  opened = os.open

  def refuse(path, *args):
    if str(path).endswith(SHARD):
      raise PermissionError(13, "Permission denied")
    return opened(path, *args)

  monkeypatch.setattr(os, "open", refuse)
  with pytest.raises(InputError, match=rf"{SHARD}: cannot be read \(Permission denied\)"):
    index.open_source(k3_copy)


@pytest.mark.parametrize("name", [SHARD, index.INDEX_FILE, "config.json"])
def test_a_link_to_nothing_is_named_with_where_it_leads(k3_copy, name):
  (k3_copy / name).unlink()
  (k3_copy / name).symlink_to("../blobs/0a1b")
  with pytest.raises(InputError, match=rf"{name}: cannot be read \(a link to \.\./blobs/0a1b, which is not there\)"):
    index.open_source(k3_copy)


# In a process of its own: waiting would be for ever.
OPEN_ALL = """
import os, sys
from pathlib import Path
from kimi_k3.convert import index
directory = Path(sys.argv[1])
for name in sys.argv[2:]:
  (directory / name).rename(directory.parent / name)
  for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
    make(directory / name)
    try: index.open_source(directory)
    except index.InputError as error: print(error)
    (directory / name).unlink()
  (directory.parent / name).rename(directory / name)
"""


def test_pipes_and_devices_are_refused_without_waiting_for_them(k3_copy):
  names = [SHARD, index.INDEX_FILE, "config.json"]
  command = [sys.executable, "-c", OPEN_ALL, str(k3_copy), *names]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
  refusals = done.stdout.splitlines()
  assert len(refusals) == 6
  for name, refusal in zip([name for name in names for _ in range(2)], refusals, strict=True):
    assert f"{name}: cannot be read (a pipe, a device or a socket, expected a file)" in refusal


def test_an_index_of_other_shards_is_called_another_release(k3_copy):
  (k3_copy / SHARD).rename(k3_copy / "model-00002-of-000004.safetensors")
  with pytest.raises(InputError) as error:
    index.open_source(k3_copy)
  message = str(error.value)
  assert f"{SHARD}: named by the index, not there" in message
  assert "model-00002-of-000004.safetensors: not named by the index" in message
  assert "not of the same release" in message


@pytest.mark.parametrize("total", [0, 2018911, 2018913, "2018912", True, [], 1e300])
def test_a_total_size_that_contradicts_the_shards_is_noted(k3_copy, total):
  content = json.loads((k3_copy / index.INDEX_FILE).read_text())
  assert content["metadata"]["total_size"] == 2018912
  (k3_copy / index.INDEX_FILE).write_text(json.dumps(content | {"metadata": {"total_size": total}}))
  (note,) = index.open_source(k3_copy).notes
  assert "metadata.total_size is " in note
  assert "the tensors of the shards have 2018912 bytes" in note


@pytest.mark.parametrize("metadata", [{}, {"total_size": 2018912.0}, None])
def test_an_index_need_not_say_the_total_size(k3_copy, metadata):
  content = json.loads((k3_copy / index.INDEX_FILE).read_text())
  (k3_copy / index.INDEX_FILE).write_text(json.dumps(content | {"metadata": metadata}))
  assert len(index.open_source(k3_copy).tensors) == 1504


@pytest.mark.parametrize("metadata", [[], {"format": 1}, "pt", None])
def test_metadata_of_a_header_must_be_strings(k3_copy, metadata):
  rewrite_header(k3_copy / SHARD, lambda header: header | {"__metadata__": metadata})
  with pytest.raises(InputError, match=rf"{SHARD}: header: __metadata__ is "):
    index.open_source(k3_copy)


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "\x1b[2Ja", "\ud800", "\u2028", "x" * 513])
def test_a_tensor_whose_name_nobody_can_print_is_refused_in_print(k3_copy, name):
  rewrite_header(k3_copy / SHARD, lambda header: header | {name: header.pop(_first(header))})
  with pytest.raises(InputError, match="too long, or not printable") as error:
    index.open_source(k3_copy)
  assert str(error.value).isprintable()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1" * 25])
@pytest.mark.parametrize("name", ["config.json", index.INDEX_FILE])
def test_numbers_that_json_has_not_or_64_bits_have_not_are_refused(k3_copy, name, literal):
  (k3_copy / name).write_text(f'{{"weight_map": {{}}, "a": {literal}}}')
  with pytest.raises(InputError, match=rf"{name}: not valid JSON"):
    index.open_source(k3_copy)


def test_a_config_nested_too_deep_is_refused(k3_copy):
  (k3_copy / "config.json").write_text('{"a": ' + "[" * 40 + "]" * 40 + "}")
  with pytest.raises(InputError, match="nested deeper than 32 levels"):
    index.open_source(k3_copy)
