from __future__ import annotations

import argparse
import shutil

import pytest

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
