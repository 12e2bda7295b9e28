"""The verb `slice`: flags, what it says, and exit codes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kimi_k3.cli.main import main
from kimi_k3.convert import index, plan


def test_a_slice_is_one_line_on_stdout_and_notes_go_to_stderr(k3_tiny, tmp_path, capsys):
  out = tmp_path / "out"
  words = ["slice", str(k3_tiny.checkpoint), str(out), "--layers", "0-7", "--experts", "4", "--shard-size", "200kB"]
  assert main(words) == 0
  said = capsys.readouterr()
  assert said.out.startswith(f"{out}: 380 tensors, 1125232 bytes, 6 shards, ")
  assert said.out.count("\n") == 1
  assert "layers 0-7 of 13 become 0-7: 6 KDA, 2 MLA, 7 with experts" in said.err
  assert "12 vision tensors (vision_tower.* or mm_projector.*) are not carried" in said.err
  with index.open_source(out) as written:
    assert plan.make_plan(written, plan.Options()).config.num_experts == 4
  before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
  assert main(words) == 0
  assert "already holds this slice, nothing written" in capsys.readouterr().err
  assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before
  assert main([*words[:4], "0-3", "--overwrite"]) == 0
  assert "4 with experts" not in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(kimi_linear_tiny, tmp_path, capsys):
  words = ["slice", str(kimi_linear_tiny.checkpoint), str(tmp_path / "out"), "--layers", "1-4", "--dry-run"]
  assert main(words) == 0
  said = capsys.readouterr()
  assert said.out.startswith(f"{tmp_path / 'out'}: would hold ")
  assert said.out.endswith(" free: enough\n")
  assert "first_k_dense_replace becomes 0 (was 1)" in said.err
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (("--layers", "0-13"), "--layers is 0-13: the checkpoint has layers 0-12"),
    (("--layers", "5-2"), "--layers is 5-2: ends before it starts"),
    (("--layers", "all"), "--layers is 'all', expected one range such as 0-7"),
    (("--layers=-1-3",), "--layers is '-1-3', expected one range"),
    (("--experts", "0"), "--experts is 0, expected 1 to 16"),
    (("--experts", "17"), "--experts is 17, expected 1 to 16"),
    (("--experts", "many"), "--experts is 'many', expected a number of experts"),
    (("--experts", "4", "--shard-size", "0"), "--shard-size is '0', expected a size"),
    ((), "neither --layers nor --experts is given"),
  ],
)
def test_wrong_flags_are_refused_in_one_line_and_nothing_is_written(k3_tiny, tmp_path, refused, words, said):
  assert said in refused("slice", k3_tiny.checkpoint, tmp_path / "out", *words)
  assert not list(tmp_path.iterdir())


def test_a_source_that_is_none_is_refused(tmp_path, refused):
  assert "no such directory" in refused("slice", tmp_path / "nowhere", tmp_path / "out", "--layers", "0-3")


@pytest.mark.slow  # compiles
def test_a_converted_slice_computes_what_the_reference_computes_from_the_slice(
  k3_tiny, tmp_path, convert, reference, ids_file
):
  rows = [[1, 2, 3, 4], [7, 8]]
  cut, result = tmp_path / "slice", tmp_path / "logits.npz"
  assert main(["slice", str(k3_tiny.checkpoint), str(cut), "--layers", "4-12", "--experts", "6"]) == 0
  words = ["logits", str(convert(cut) / "decode.yml"), "--tokens", ids_file(rows), "--out", str(result)]
  assert main([*words, "dtype=float32", "matmul_precision=highest"]) == 0
  checkpoint, found = reference.load_checkpoint(cut), np.load(result)
  for i, row in enumerate(rows):
    expected = reference.forward(checkpoint, np.array([row]))["logits"][0]
    # Of the largest logit, as for the golden cases: float32 arithmetic against float64. 2.4e-6 here.
    np.testing.assert_allclose(found[f"logits_{i}"], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
  assert json.loads((cut / "slice.json").read_text())["options"]["layers"] == [4, 12]
