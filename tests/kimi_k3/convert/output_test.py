from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import types
from pathlib import Path

import pytest
import yaml

from kimi_k3.convert import index, output, plan, write
from kimi_k3.convert.plan import Options
from kimi_k3.errors import InputError
from kimi_k3.maxtext_keys import to_maxtext


@pytest.fixture
def source(small_sources) -> index.Source:
  return small_sources["k3"]


def planned(source, **options) -> plan.Plan:
  return plan.make_plan(source, Options(**options))


def convert(out, source, made) -> None:
  output.convert(out, source, made, workers=2, command="kimi-k3 convert SRC OUT")


@pytest.fixture(scope="session")
def converted(small_sources, tmp_path_factory):
  """A finished conversion; tests that change it copy it."""
  out = tmp_path_factory.mktemp("converted") / "out"
  convert(out, small_sources["k3"], planned(small_sources["k3"]))
  return out


def snapshot(directory):
  return sorted((str(path.relative_to(directory)), path.stat().st_mtime_ns) for path in directory.rglob("*"))


def test_out_holds_the_checkpoint_the_config_the_record_and_the_sources_small_files(small_sources, tmp_path):
  src = shutil.copytree(small_sources["k3"].directory, tmp_path / "source")
  for name in ("tiktoken.model", "tokenizer_config.json", "README.md"):
    (src / name).write_text(name)
  source = index.open_source(src)
  convert(tmp_path / "deep" / "out", source, planned(source))
  assert sorted(path.name for path in (tmp_path / "deep" / "out").iterdir()) == [
    "0", "config.json", "conversion.json", "decode.yml", "tiktoken.model", "tokenizer_config.json",
  ]  # fmt: skip
  assert (tmp_path / "deep" / "out" / "config.json").read_bytes() == (src / "config.json").read_bytes()
  assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_decode_yml_is_the_config_in_maxtexts_words_with_a_relative_path(converted, source):
  made = planned(source)
  keys = yaml.safe_load((converted / "decode.yml").read_text())
  assert keys.pop("base_config") == "base.yml"
  assert (converted / keys.pop("load_parameters_path") / "_METADATA").is_file()
  assert keys == to_maxtext(made.config, scan_layers=made.scan, dtype="bfloat16")
  assert "kimi-k3 convert SRC OUT" in (converted / "decode.yml").read_text().splitlines()[0]


def test_the_record_names_source_options_and_size(converted, source):
  record, made = json.loads((converted / "conversion.json").read_text()), planned(source)
  assert record["schema"] == 1
  assert record["source"]["fingerprint"] == plan.fingerprint(source)
  assert record["options"] == {"scan": True, "experts": "as-stored", "dense": "as-stored"}
  assert (record["leaves"], record["bytes"]) == (len(made.leaves), made.nbytes)
  assert record["stored"]["a_log_shape"] == [32]
  assert list(record["checksums"]) == [".".join(leaf.path) for leaf in made.leaves]


def test_the_same_conversion_is_recognised(converted, source):
  assert output.check_output(converted, source, planned(source, experts="mxfp4"), overwrite=False)


@pytest.mark.parametrize("change", ["source", "options", "record", "schema", "items"])
def test_another_conversion_needs_overwrite_and_the_difference_is_said(converted, source, edited, tmp_path, change):
  out, made = shutil.copytree(converted, tmp_path / "out"), planned(source)
  record = json.loads((out / "conversion.json").read_text())
  if change == "source":
    made = planned(edited(source, config=dict(source.config) | {"ignore_index": 7}))
  elif change == "options":
    made = planned(source, scan=False)
  elif change == "record":
    (out / "conversion.json").write_text("{")
  elif change == "schema":
    (out / "conversion.json").write_text(json.dumps(record | {"schema": 2}))
  else:
    shutil.rmtree(out / "0")
  said = {"source": "another source", "options": "scan=true.*asked for scan=false", "record": "cannot be read"}
  said |= {"schema": "schema 2, this version writes 1", "items": "without its 0/items"}
  with pytest.raises(InputError, match=f"{said[change]}.*--overwrite"):
    output.check_output(out, source, made, overwrite=False)
  assert not output.check_output(out, source, made, overwrite=True)


def test_overwriting_replaces_the_whole_directory(converted, source, tmp_path):
  out = shutil.copytree(converted, tmp_path / "out")
  (out / "note.txt").write_text("of the old conversion")
  convert(out, source, planned(source, scan=False))
  assert not json.loads((out / "conversion.json").read_text())["options"]["scan"]
  assert not (out / "note.txt").exists()
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_is_no_conversion_is_never_overwritten(source, tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  for overwrite in (False, True):
    with pytest.raises(InputError, match="not a conversion, never overwritten"):
      output.check_output(tmp_path, source, planned(source), overwrite=overwrite)
  with pytest.raises(InputError, match="not a directory"):
    output.check_output(tmp_path / "thesis.tex", source, planned(source), overwrite=True)


def test_an_empty_directory_is_used(source, tmp_path):
  out = tmp_path / "out"
  out.mkdir()
  assert not output.check_output(out, source, planned(source), overwrite=False)
  convert(out, source, planned(source))
  assert (out / "0" / "items" / "_METADATA").is_file()


def test_out_and_src_may_not_be_inside_each_other(k3_copy):
  source = index.open_source(k3_copy)
  for out in (k3_copy, k3_copy / "out", k3_copy / "a" / ".." / "out", k3_copy.parent):
    with pytest.raises(InputError, match="the same or inside each other"):
      output.check_output(out, source, planned(source), overwrite=True)


@pytest.mark.parametrize("error", [InputError("a bad tensor"), KeyboardInterrupt(), OSError("disk full")])
def test_a_failure_leaves_what_was_there_and_nothing_beside_it(converted, source, tmp_path, monkeypatch, error):
  out = shutil.copytree(converted, tmp_path / "out")
  before = snapshot(out)

  def fail(directory, *_, **__):
    (directory / "items").mkdir()
    raise error

  monkeypatch.setattr(write, "write_checkpoint", fail)
  for target in (out, tmp_path / "new"):
    with pytest.raises(type(error)):
      convert(target, source, planned(source, scan=False))
  assert snapshot(out) == before
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ctrl_c_during_the_writing_leaves_nothing(source, tmp_path, monkeypatch):
  def interrupt(*_, **__):
    time.sleep(0.2)  # While workers write.
    raise KeyboardInterrupt

  monkeypatch.setattr(write.concurrent.futures, "as_completed", interrupt)
  with pytest.raises(KeyboardInterrupt):
    convert(tmp_path / "out", source, planned(source))
  assert not list(tmp_path.iterdir())


def test_the_remains_of_a_killed_conversion_are_cleared(source, tmp_path):
  remains = tmp_path / f"out.partial-{plan.fingerprint(source)[:12]}"
  (remains / "0" / "items").mkdir(parents=True)
  convert(tmp_path / "out", source, planned(source))
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_refused_before_anything_is_written(source, tmp_path, monkeypatch):
  monkeypatch.setattr(output.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=9))
  with pytest.raises(InputError, match=r"9 bytes free, the conversion takes [\d,]+"):
    convert(tmp_path / "out", source, planned(source))
  assert not list(tmp_path.iterdir())


def test_the_source_is_only_read(k3_copy, tmp_path):
  before = snapshot(k3_copy)
  for path in k3_copy.iterdir():
    path.chmod(0o444)
  source = index.open_source(k3_copy)
  convert(tmp_path / "out", source, planned(source))
  assert snapshot(k3_copy) == before


@pytest.mark.parametrize("spelled", ["../out", "a/../../out", "./../here/../out"])
def test_out_may_be_spelled_with_dots(source, tmp_path, monkeypatch, spelled):
  (tmp_path / "here" / "a").mkdir(parents=True)
  monkeypatch.chdir(tmp_path / "here")
  convert(Path(spelled), source, planned(source))
  assert (tmp_path / "out" / "0" / "items" / "_METADATA").is_file()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "out"]


def test_two_conversions_do_not_write_to_one_place(source, tmp_path):
  theirs = tmp_path / f"out.partial-{plan.fingerprint(source)[:12]}"
  (theirs / "0" / "items").mkdir(parents=True)
  descriptor = os.open(theirs, os.O_RDONLY)
  fcntl.flock(descriptor, fcntl.LOCK_EX)  # as the other process holds it
  before = snapshot(tmp_path)
  with pytest.raises(InputError, match="another conversion is writing there"):
    convert(tmp_path / "out", source, planned(source))
  assert snapshot(tmp_path) == before
  os.close(descriptor)  # as when it is killed
  convert(tmp_path / "out", source, planned(source))
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("existed", [False, True])
def test_what_appears_meanwhile_is_not_replaced(converted, source, tmp_path, monkeypatch, existed):
  out = tmp_path / "out"
  if existed:
    out.mkdir()

  def finish_another(*_, **__):
    shutil.move(out, tmp_path / "moved") if existed else None
    shutil.copytree(converted, out)
    return {}

  monkeypatch.setattr(write, "write_checkpoint", finish_another)
  with pytest.raises(InputError, match="changed while the conversion ran, nothing written"):
    convert(out, source, planned(source, scan=False))
  assert json.loads((out / "conversion.json").read_text())["options"]["scan"]
  assert not list(tmp_path.glob("*partial*"))


def test_another_training_of_the_same_shapes_is_another_source(tiny_checkpoint, tmp_path):
  few = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
  first, second = (index.open_source(tiny_checkpoint(*few, "--seed", seed)) for seed in ("1", "2"))
  assert plan.fingerprint(first) == plan.fingerprint(second)  # every header is the same
  convert(tmp_path / "out", first, planned(first))
  assert output.check_output(tmp_path / "out", first, planned(first), overwrite=False)
  with pytest.raises(InputError, match="holds a conversion of another source"):
    output.check_output(tmp_path / "out", second, planned(second), overwrite=False)
