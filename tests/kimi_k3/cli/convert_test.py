from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kimi_k3.cli import convert
from kimi_k3.convert import index
from kimi_k3.errors import InputError

VERB = "convert"


def run(*words) -> int:
  parser = argparse.ArgumentParser(prog="kimi-k3")
  convert.add_parser(parser.add_subparsers(required=True))
  args = parser.parse_args([VERB, *map(str, words)])
  return args.run(args)


@pytest.fixture(scope="module")
def converted(k3_tiny, tmp_path_factory):
  """A finished conversion of the golden checkpoint."""
  out = tmp_path_factory.mktemp("converted") / "out"
  assert run(k3_tiny.checkpoint, out) == 0
  return out


def test_the_result_is_one_line_on_stdout_and_the_log_goes_to_stderr(k3_tiny, tmp_path, capsys):
  out = tmp_path / "out"
  assert run(k3_tiny.checkpoint, out, "--no-scan", "--workers", "1") == 0
  said = capsys.readouterr()
  assert said.out.startswith(f"{out}: 412 leaves, 1976848 bytes, ")
  assert said.out.count("\n") == 1
  assert "1,406,084 weights; --no-scan" in said.err
  header = (out / "decode.yml").read_text().splitlines()[0]
  assert header == f"# Written by: kimi-k3 convert {k3_tiny.checkpoint} {out} --no-scan --experts as-stored"


def test_a_dry_run_prints_the_plan_and_writes_nothing(k3_tiny, tmp_path, capsys):
  assert run(k3_tiny.checkpoint, tmp_path / "out", "--dry-run") == 0
  said = capsys.readouterr().out
  assert "13: 9 KDA, 4 MLA, 12 with 16 experts" in said
  assert "4 leading layers, 2 blocks of 4, tail of 1" in said
  assert "282 from 1,492 pieces" in said
  assert "bfloat16 1.527 MiB, float32 60.52 KiB, uint8 306 KiB" in said
  assert not list(tmp_path.iterdir())


def test_a_second_run_says_so_and_writes_nothing(k3_tiny, converted, capsys):
  before = sorted((path, path.stat().st_mtime_ns) for path in converted.rglob("*"))
  assert run(k3_tiny.checkpoint, converted, "--scan") == 0
  assert "already holds this conversion, nothing written" in capsys.readouterr().err
  assert sorted((path, path.stat().st_mtime_ns) for path in converted.rglob("*")) == before


def test_other_options_are_refused_without_overwrite_and_obeyed_with_it(k3_tiny, converted, tmp_path):
  out = shutil.copytree(converted, tmp_path / "out")
  with pytest.raises(InputError, match=r"experts=as-stored.*asked for.*experts=bf16"):
    run(k3_tiny.checkpoint, out, "--experts", "bf16")
  assert run(k3_tiny.checkpoint, out, "--experts", "bf16", "--overwrite") == 0
  assert "packed_modules: []" in (out / "decode.yml").read_text()


@pytest.mark.parametrize(
  ("words", "flag"),
  [
    (("--part", "1/4"), "--part"),
    (("--finish",), "--finish"),
    (("--ram-budget", "8000000000"), "--ram-budget"),
    (("--experts", "fp8-block"), "--experts fp8-block"),
    (("--dense", "fp8-block"), "--dense fp8-block"),
  ],
)
def test_flags_of_later_versions_are_refused_by_name(k3_tiny, tmp_path, words, flag):
  with pytest.raises(InputError, match=f"{flag}: not yet supported"):
    run(k3_tiny.checkpoint, tmp_path / "out", *words)
  assert not list(tmp_path.iterdir())


def test_a_worker_count_below_one_is_refused(k3_tiny, tmp_path):
  with pytest.raises(InputError, match="--workers is 0, expected 1 or more"):
    run(k3_tiny.checkpoint, tmp_path / "out", "--workers", "0")


def test_help_teaches_with_an_example(capsys):
  with pytest.raises(SystemExit) as stop:
    run("--help")
  assert stop.value.code == 0
  assert "kimi-k3 convert Kimi-K3/ k3-maxtext/ --dry-run" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("suffix", "at", "message"),
  [
    (".w2.weight_scale", 0, "scale byte 255 at row 0, group 0 means NaN"),
    (".A_log", -1, "4 heads then zero padding expected, 1 of 28 non-zero past row 4"),
  ],
)
def test_bad_data_is_refused_by_name_and_leaves_nothing(k3_tiny, tmp_path, suffix, at, message):
  src = shutil.copytree(k3_tiny.checkpoint, tmp_path / "source")
  shard = src / "model-00001-of-000003.safetensors"
  tensor = next(t for t in index.read_header(src, shard.name) if t.name.endswith(suffix))
  data = bytearray(shard.read_bytes())
  data[tensor.offset + at % tensor.nbytes] = 255
  shard.write_bytes(data)
  for experts in ("as-stored", "bf16"):
    with pytest.raises(InputError, match=f"{tensor.name}: {message}"):
      run(src, tmp_path / "out", "--experts", experts)
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


FIRST, SECOND = (f"model-0000{i}-of-000003.safetensors" for i in (1, 2))


def remove(src: Path) -> None:
  (src / SECOND).unlink()


def truncate(src: Path) -> None:
  (src / SECOND).write_bytes((src / SECOND).read_bytes()[:-1000])


def name_a_missing_shard(src: Path) -> None:
  edit_index(src, lambda shards: shards | {"language_model.lm_head.weight": "model-00004-of-000003.safetensors"})


def store_twice(src: Path) -> None:
  edit_shards(src, lambda held, _: held.update({"language_model.lm_head.weight": np.zeros(1, np.float32)}))


def edit_index(src: Path, edit: Callable[[dict], dict]) -> None:
  content = json.loads((src / index.INDEX_FILE).read_text())
  (src / index.INDEX_FILE).write_text(json.dumps(content | {"weight_map": edit(content["weight_map"])}))


def edit_shards(src: Path, edit: Callable[[dict, str], object]) -> None:
  """Rewrites every shard after edit(its tensors, its name)."""
  for path in src.glob("*.safetensors"):
    held = load_file(path)
    edit(held, path.name)
    save_file(held, path)


DAMAGED_FILES = {
  "a shard is missing": (remove, f"{SECOND}: cannot be read (No such file or directory)"),
  "a shard is truncated": (truncate, f"{SECOND}: "),
  "the index names a shard that is not there": (name_a_missing_shard, "model-00004-of-000003.safetensors: cannot be"),
  "a tensor stands in several shards": (store_twice, f"language_model.lm_head.weight: stored in {FIRST} and in "),
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_damaged_files_are_refused_in_one_line_and_nothing_is_written(k3_tiny, tmp_path, refused, damage):
  src = shutil.copytree(k3_tiny.checkpoint, tmp_path / "source")
  make, said = DAMAGED_FILES[damage]
  make(src)
  assert said in refused("convert", src, tmp_path / "out")
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


DAMAGED = "model.layers.1.self_attn.f_b_proj.weight"  # bfloat16 [128, 32] in both golden cases
DAMAGED_TENSORS = {
  "deleted": lambda held, name: held.pop(name),
  "renamed": lambda held, name: held.update({name.replace("layers.1.", "layers.3."): held.pop(name)}),
  "retyped": lambda held, name: held.update({name: held[name].astype(np.float32)}),
  "transposed": lambda held, name: held.update({name: np.ascontiguousarray(held[name].T)}),
  "halved": lambda held, name: held.update({name: held[name][:64]}),
}


@pytest.mark.parametrize("damage", DAMAGED_TENSORS)
@pytest.mark.parametrize("case", ["k3_tiny", "kimi_linear_tiny"])
def test_a_damaged_tensor_is_refused_by_name_and_nothing_is_written(request, tmp_path, refused, case, damage):
  src = shutil.copytree(request.getfixturevalue(case).checkpoint, tmp_path / "source")
  name = DAMAGED if case == "kimi_linear_tiny" else f"language_model.{DAMAGED}"
  edit_shards(src, lambda held, _: DAMAGED_TENSORS[damage](held, name) if name in held else None)
  (src / index.INDEX_FILE).unlink()  # or it would name the tensor that is gone
  assert name in refused("convert", src, tmp_path / "out").replace(":", "").split()
  assert [path.name for path in tmp_path.iterdir()] == ["source"]
