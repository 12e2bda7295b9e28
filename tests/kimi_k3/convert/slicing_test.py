from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kimi_k3.convert import index, plan, slicing
from kimi_k3.convert.slicing import Options
from kimi_k3.errors import InputError

LAYER = re.compile(r"\.layers\.(\d+)\.")


@pytest.fixture
def few(small_sources) -> index.Source:
  """K3 of five layers with four experts."""
  return small_sources["k3"]


def write(out: Path, source: index.Source, **options) -> tuple[str, ...]:
  return slicing.write_slice(out, slicing.make_slice(source, Options(**options)), lambda _: None)


def expected_tensors(source: index.Source, first: int, last: int, experts: int) -> dict[str, np.ndarray]:
  """What the slice must hold, by its names: straight from the files, by the rules as a person would say them."""
  held = {}
  for shard in sorted({tensor.shard for tensor in source.tensors.values()}):
    held |= load_file(source.directory / shard)
  found = {}
  for name, value in held.items():
    if name.startswith(("vision_tower.", "mm_projector.")):
      continue
    match, expert = LAYER.search(name), re.search(r"\.experts\.(\d+)\.", name)
    if (match and not first <= int(match[1]) <= last) or (expert and int(expert[1]) >= experts):
      continue
    if ".block_sparse_moe.gate." in name:
      value = value[:experts]
    found[LAYER.sub(lambda m: f".layers.{int(m[1]) - first}.", name)] = value
  return found


@pytest.mark.parametrize(
  ("fixture", "first", "last", "experts"),
  [
    ("k3_source", 0, 12, 16),  # the whole
    ("k3_source", 0, 7, 4),
    ("k3_source", 2, 9, 3),  # fewer experts than a token takes
    ("k3_source", 0, 0, 5),  # dense alone
    ("k3_source", 12, 12, 1),  # MLA alone
    ("kimi_linear_source", 1, 5, 2),
    ("kimi_linear_source", 4, 4, 8),  # KDA alone
    ("all_packed_source", 0, 4, 7),
  ],
)
def test_a_slice_is_a_valid_checkpoint_with_the_sources_bytes(request, tmp_path, fixture, first, last, experts):
  source = request.getfixturevalue(fixture)
  names = write(tmp_path / "out", source, layers=(first, last), experts=experts, shard_bytes=200_000)
  expected = expected_tensors(source, first, last, experts)
  with index.open_source(tmp_path / "out") as written:
    planned = plan.make_plan(written, plan.Options())
    assert planned.config.num_layers == last - first + 1
    assert set(written.tensors) == set(expected)
    for name, value in expected.items():
      found = written.read(name)
      assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes()), name
  held = [name for shard in names for name in load_file(tmp_path / "out" / shard)]
  assert sorted(held) == sorted(expected)
  assert names[0] == f"model-00001-of-{len(names):06d}.safetensors"
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_golden_checkpoint_with_128_wide_heads_can_be_sliced(k3_hd128, tmp_path):
  with index.open_source(k3_hd128.checkpoint) as source:
    write(tmp_path / "out", source, layers=(0, 3), experts=2)
    expected = expected_tensors(source, 0, 3, 2)
  with index.open_source(tmp_path / "out") as written:
    assert all(written.read(name).tobytes() == value.tobytes() for name, value in expected.items())


def test_the_config_says_what_the_slice_holds_and_nothing_else_changes(k3_source):
  cut = slicing.make_slice(k3_source, Options(layers=(2, 9), experts=3))
  old, new = k3_source.config["text_config"], cut.source.config["text_config"]
  changed = {key: new[key] for key in new if new[key] != old[key]}
  assert changed == {
    "num_hidden_layers": 8,
    "first_k_dense_replace": 0,
    "num_experts": 3,
    "num_experts_per_token": 3,
    "linear_attn_config": old["linear_attn_config"] | {"kda_layers": [1, 3, 4, 5, 7, 8], "full_attn_layers": [2, 6]},
  }
  assert {key: value for key, value in cut.source.config.items() if key != "text_config"} == {
    key: value for key, value in k3_source.config.items() if key != "text_config"
  }
  assert json.loads(cut.source.config_bytes) == cut.source.config
  assert cut.notes[0] == "layers 2-9 of 13 become 0-7: 6 KDA, 2 MLA, 8 with experts"
  said = " ".join(cut.notes)
  for what in (
    "first_k_dense_replace becomes 0 (was 1)",
    "snapshots restart",
    "experts 0-2 of 16",
    "num_experts_per_token lowered to 3 (was 4)",
    "12 vision tensors",
  ):
    assert what in said


def test_what_does_not_change_is_not_said(kimi_linear_source):
  cut = slicing.make_slice(kimi_linear_source, Options(layers=(0, 7)))
  assert cut.notes == ("layers 0-7 of 13 become 0-7: 6 KDA, 2 MLA, 7 with experts",)


@pytest.mark.parametrize(("layers", "dense"), [((0, 4), 3), ((1, 4), 2), ((0, 1), 2), ((3, 8), 0)])
def test_dense_layers_left_out_in_front_are_taken_off_their_number(k3_source, layers, dense):
  config = plan.make_plan(k3_source, plan.Options()).config
  config = dataclasses.replace(config, first_k_dense_replace=3)
  text = slicing._config(k3_source.config, config, layers, 4)["text_config"]
  assert text["first_k_dense_replace"] == dense


def test_a_range_that_would_move_the_layers_with_experts_is_refused(k3_source):
  config = plan.make_plan(k3_source, plan.Options()).config
  config = dataclasses.replace(config, moe_layer_freq=2)
  slicing._config(k3_source.config, config, (2, 9), 4)
  with pytest.raises(InputError, match="start at a multiple of 2"):
    slicing._config(k3_source.config, config, (3, 9), 4)


def test_names_that_are_ignored_by_quantization_follow_their_layer():
  patterns = [
    "lm_head",
    "re:.*self_attn.*",
    "model.layers.1.mlp.gate_proj",
    "model.layers.4.self_attn.o_proj",
    "model.layers.4.block_sparse_moe.experts.3.w1",
    "model.layers.4.block_sparse_moe.experts.1.w1",
  ]
  assert slicing._ignored(patterns, (2, 5), 2) == [
    "lm_head",
    "re:.*self_attn.*",
    "model.layers.2.self_attn.o_proj",
    "model.layers.2.block_sparse_moe.experts.1.w1",
  ]


@pytest.mark.parametrize(
  "text", ["", "7", "0-", "-3", "0-7-9", "a-b", "0:7", "1.5-3", "\u0661-\u0663", "0-99999999999"]
)
def test_what_is_no_range_is_refused(text):
  with pytest.raises(InputError, match="expected one range such as 0-7"):
    slicing.parse_layers(text)


def test_a_range_that_ends_before_it_starts_is_refused():
  assert slicing.parse_layers("3-3") == (3, 3)
  with pytest.raises(InputError, match="ends before it starts; did you mean 3-5"):
    slicing.parse_layers("5-3")


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"layers": (0, 13)}, "--layers is 0-13: the checkpoint has layers 0-12"),
    ({"layers": (20, 30)}, "--layers is 20-30: the checkpoint has layers 0-12"),
    ({"experts": 0}, "--experts is 0, expected 1 to 16"),
    ({"experts": 17}, "--experts is 17, expected 1 to 16"),
  ],
)
def test_layers_and_experts_that_are_not_there_are_refused(k3_source, options, said):
  with pytest.raises(InputError, match=re.escape(said)):
    slicing.make_slice(k3_source, Options(**options))


def test_a_source_that_cannot_be_converted_cannot_be_sliced(k3_source, edited):
  name = next(iter(k3_source.tensors))
  with pytest.raises(InputError, match=f"{re.escape(name)}: missing"):
    slicing.make_slice(edited(k3_source, {name: None}), Options(layers=(0, 3)))


def test_tokenizer_and_code_are_copied_and_the_rest_is_named(k3_copy, tmp_path):
  for name in ("tokenizer_config.json", "tiktoken.model", "modeling_kimi.py", "LICENSE", "README.md"):
    (k3_copy / name).write_text(name)
  (k3_copy / "assets").mkdir()
  with index.open_source(k3_copy) as source:
    cut = slicing.make_slice(source, Options(layers=(0, 3)))
    slicing.write_slice(tmp_path / "out", cut, lambda _: None)
  assert cut.copied == ("LICENSE", "modeling_kimi.py", "tiktoken.model", "tokenizer_config.json")
  assert all((tmp_path / "out" / name).read_text() == name for name in cut.copied)
  assert cut.notes[-1] == "not copied: README.md, assets"


def test_no_shard_is_larger_than_it_may_be_unless_one_tensor_is(k3_source):
  cut = slicing.make_slice(k3_source, Options(layers=(0, 7), shard_bytes=30_000))
  sizes = [sum(cut.source.tensors[name].nbytes for name in file) for file in cut.files]
  assert all(size <= 30_000 or len(file) == 1 for size, file in zip(sizes, cut.files, strict=True))
  assert len(sizes) > 20
  assert sum(sizes) == cut.nbytes


def test_a_slice_can_be_sliced_again(few, tmp_path):
  write(tmp_path / "first", few, layers=(0, 4), experts=3)
  with index.open_source(tmp_path / "first") as source:
    write(tmp_path / "second", source, layers=(2, 4), experts=2)
  write(tmp_path / "direct", few, layers=(2, 4), experts=2)
  for path in (tmp_path / "direct").iterdir():
    same = path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
    assert same == (path.name != slicing.RECORD), path.name


def test_a_second_run_finds_its_slice_and_another_needs_overwrite(few, tmp_path):
  out = tmp_path / "out"
  cut = slicing.make_slice(few, Options(layers=(0, 3)))
  other = slicing.make_slice(few, Options(layers=(0, 4)))
  assert not slicing.check_output(out, few, cut, overwrite=False)
  slicing.write_slice(out, cut, lambda _: None)
  assert slicing.check_output(out, few, cut, overwrite=False)
  with pytest.raises(InputError, match="holds another slice; give --overwrite"):
    slicing.check_output(out, few, other, overwrite=False)
  assert not slicing.check_output(out, few, other, overwrite=True)
  slicing.write_slice(out, other, lambda _: None, overwrite=True)
  with index.open_source(out) as written:
    assert plan.make_plan(written, plan.Options()).config.num_layers == 5
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_slice_is_seen_and_written_anew_when_told(few, tmp_path):
  out, cut = tmp_path / "out", slicing.make_slice(few, Options(layers=(0, 3), shard_bytes=300_000))
  write(out, few, layers=(0, 3), shard_bytes=300_000)
  whole = {path.name: path.read_bytes() for path in out.iterdir()}
  for name in ("model-00002-of-000003.safetensors", "config.json", index.INDEX_FILE):
    (out / name).unlink()
    with pytest.raises(InputError, match=f"holds this slice, but {re.escape(name)} is missing"):
      slicing.check_output(out, few, cut, overwrite=False)
    slicing.write_slice(out, cut, lambda _: None, overwrite=True)
  content = bytearray(whole["model-00002-of-000003.safetensors"])
  content[-1] ^= 1
  (out / "model-00002-of-000003.safetensors").write_bytes(content)
  assert not slicing.check_output(out, few, cut, overwrite=True)  # Written anew, whatever it looks like.
  slicing.write_slice(out, cut, lambda _: None, overwrite=True)
  assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


@pytest.mark.parametrize("damage", [False, True])
def test_what_appears_at_out_meanwhile_is_kept_and_the_finished_slice_too(few, tmp_path, damage):
  out, cut = tmp_path / "out", slicing.make_slice(few, Options(layers=(0, 3)))

  def strange(_):
    out.mkdir(exist_ok=True)
    (out / "mine").touch()

  with pytest.raises(InputError, match=r"changed meanwhile \(mine\).*the finished slice is kept in .*out\.partial"):
    slicing.write_slice(out, cut, strange)
  with pytest.raises(InputError, match="never overwritten"):
    slicing.write_slice(out, cut, lambda _: None, overwrite=True)
  shutil.rmtree(out)
  with pytest.raises(InputError, match="holds another finished slice"):
    write(out, few, layers=(0, 2))
  if damage:
    (tmp_path / "out.partial/out" / cut.names[0]).write_bytes(b"")
  written = []
  slicing.write_slice(out, cut, written.append)
  assert sum(written) == (cut.nbytes if damage else 0)
  assert slicing.check_output(out, few, cut, overwrite=False)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_slice_that_is_called_partial_is_not_emptied(few, tmp_path):
  write(tmp_path / "out.partial", few, layers=(0, 3))
  before = sorted((tmp_path / "out.partial").iterdir())
  with pytest.raises(InputError, match=r"out\.partial: holds config\.json; .*which no unfinished slice left"):
    write(tmp_path / "out", few, layers=(0, 3))
  assert sorted((tmp_path / "out.partial").iterdir()) == before


def test_what_is_no_slice_is_never_overwritten(k3_copy, tmp_path):
  with index.open_source(k3_copy) as source:
    cut = slicing.make_slice(source, Options(layers=(0, 3)))
    mine, file, link = tmp_path / "mine", tmp_path / "file", tmp_path / "link"
    mine.mkdir()
    (mine / "notes.txt").touch()
    file.touch()
    link.symlink_to(mine)
    for out, said in (
      (mine, "not a slice, never overwritten"),
      (file, "not a directory"),
      (link, "not a directory"),
      (k3_copy, "the same or inside"),
      (k3_copy / "out", "the same or inside"),
      (tmp_path, "the same or inside"),
      ("gs://bucket/x", "a local directory, no URL"),
      ("", "an empty path"),
    ):
      with pytest.raises(InputError, match=said):
        slicing.check_output(out, source, cut, overwrite=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_no_more_leaves_nothing(few, tmp_path, monkeypatch, number):
  def full(_descriptor):
    raise OSError(number, "the disk says no")

  monkeypatch.setattr(slicing.os, "fsync", full)
  with pytest.raises(InputError, match="the disk says no"):
    write(tmp_path / "out", few, layers=(0, 3))
  assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_written(few, tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)._replace(free=1_000)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
  with pytest.raises(InputError, match=r"1,000 bytes free, the slice takes [\d,]+"):
    write(tmp_path / "out", few, layers=(0, 3))
  assert not list(tmp_path.iterdir())


def test_a_source_that_changes_meanwhile_is_an_error_and_leaves_nothing(k3_copy, tmp_path):
  with index.open_source(k3_copy) as source:
    cut = slicing.make_slice(source, Options(layers=(0, 3)))
    shard = k3_copy / "model-00001-of-000003.safetensors"

    time.sleep(0.02)  # the clock of a file system is coarse
    with pytest.raises(InputError, match="changed while it was read"):
      slicing.write_slice(tmp_path / "out", cut, lambda _: shard.touch())
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupt_leaves_nothing(few, tmp_path):
  def interrupt(_):
    raise KeyboardInterrupt

  cut = slicing.make_slice(few, Options(layers=(0, 3)))
  with pytest.raises(KeyboardInterrupt):
    slicing.write_slice(tmp_path / "out", cut, interrupt)
  assert not list(tmp_path.iterdir())


KILLED = """
import os, sys
from pathlib import Path
from kimi_k3.convert import index, slicing
source = index.open_source(sys.argv[1])
cut = slicing.make_slice(source, slicing.Options(layers=(0, 4), shard_bytes=100_000))
done = 0
def die(nbytes):
  global done
  done += nbytes
  if done > cut.nbytes // 2:
    os._exit(9)
slicing.write_slice(Path(sys.argv[2]), cut, die)
"""


def test_a_killed_run_leaves_no_out_and_the_next_one_starts_over(few, tmp_path):
  command = [sys.executable, "-c", KILLED, str(few.directory), str(tmp_path / "out")]
  assert subprocess.run(command, timeout=60, check=False).returncode == 9
  assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
  (tmp_path / "out.partial" / "mine").mkdir()
  with pytest.raises(InputError, match=r"out\.partial: holds mine, which no unfinished slice left"):
    write(tmp_path / "out", few, layers=(0, 3))
  (tmp_path / "out.partial" / "mine").rename(tmp_path / "out.partial" / "out" / "mine")
  with pytest.raises(InputError, match=r"out\.partial: holds out/mine, which no unfinished slice left"):
    write(tmp_path / "out", few, layers=(0, 3))
  (tmp_path / "out.partial" / "out" / "mine").rmdir()
  write(tmp_path / "out", few, layers=(0, 3))
  assert [path.name for path in tmp_path.iterdir()] == ["out"]
  assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


def test_a_directory_of_others_is_not_emptied(few, tmp_path):
  (tmp_path / "out.partial").mkdir()
  (tmp_path / "out.partial" / "plan.json").touch()
  with pytest.raises(InputError, match=r"holds plan\.json, which no unfinished slice left"):
    write(tmp_path / "out", few, layers=(0, 3))
  assert (tmp_path / "out.partial" / "plan.json").exists()


def test_two_slices_do_not_write_to_one_place(few, tmp_path):
  cut = slicing.make_slice(few, Options(layers=(0, 3)))

  def second(_):
    with pytest.raises(InputError, match="another slice is being written there"):
      slicing.write_slice(tmp_path / "out", cut, lambda _: None)
    seen.append(True)

  seen: list[bool] = []
  slicing.write_slice(tmp_path / "out", cut, second)
  assert seen
  with index.open_source(tmp_path / "out") as written:
    plan.make_plan(written, plan.Options())
