"""`kimi-k3 export`: what it says, what it refuses, and that a dry run writes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kimi_k3.cli.main import main

FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")


def test_the_result_converts_to_the_same_bytes_again(tiny_checkpoint, five_layers, tmp_path, capsys):
  src, target = tiny_checkpoint(*FEW), tmp_path / "hf"
  words = ["export", str(five_layers), str(target), "--vision-from", str(src), "--shard-size", "100K"]
  assert main(words) == 0
  said = capsys.readouterr()
  assert "vision is not carried" not in said.err
  assert " bytes to write, " in said.err
  assert said.out.startswith(f"{target}: ")
  assert main(words) == 0
  assert "already holds this export, nothing written" in capsys.readouterr().err
  assert main(["convert", str(target), str(tmp_path / "again")]) == 0
  assert main(["verify", str(src), str(tmp_path / "again")]) == 1  # Another source, by its record: other shards.
  said = capsys.readouterr().out
  assert [line.split()[0] for line in said.splitlines() if line.endswith(" FAILED")] == ["stale", "shards"]


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(five_layers, tmp_path, capsys):
  assert main(["export", str(five_layers), str(tmp_path / "hf"), "--dry-run"]) == 0
  said = capsys.readouterr()
  assert "vision is not carried: OUT holds the text model only; give --vision-from SRC" in said.err
  assert "shards   1 of up to" in said.out
  assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_refused_in_one_line(five_layers, tiny_checkpoint, convert, refused, tmp_path):
  target = tmp_path / "hf"
  assert "--shard-size is 'x'" in refused("export", five_layers, target, "--shard-size", "x")
  assert "--workers is 0" in refused("export", five_layers, target, "--workers", "0")
  assert "nothing there" in refused("export", tmp_path / "no", target)
  assert "no such directory" in refused("export", five_layers, target, "--vision-from", tmp_path / "no")
  rounded = convert(tiny_checkpoint(*FEW), "--dense", "fp8-block")
  assert "export the as-stored conversion" in refused("export", rounded, target)
  assert not target.exists()


def test_a_url_as_target_is_refused(five_layers, capsys):
  assert main(["export", str(five_layers), "gs://bucket/hf"]) == 2
  assert "HF_DIR is a local directory, no URL" in capsys.readouterr().err


TRAINED = ("--layers", "12", "--set", "num_experts=4", "--set", "num_experts_per_token=2")


@pytest.fixture(scope="module")
def run(tiny_checkpoint, trained_step) -> tuple[Path, Path]:
  """A step of a trainer's run, and the config that it was trained with."""
  step = trained_step(tiny_checkpoint(*TRAINED), "--scan")
  return step, step.parents[1] / "train.yml"


def test_a_training_run_is_exported_and_what_comes_out_converts(run, tmp_path, capsys):
  step, config = run
  words = ["export", str(step), str(tmp_path / "hf"), "--config", str(config), "--shard-size", "300K"]
  assert main([*words, "--dry-run"]) == 0
  said = capsys.readouterr().out
  assert "experts  rounded to MXFP4\nmemory   64 KiB of arrays at a time" in said
  assert list(tmp_path.iterdir()) == []
  assert main(words) == 0
  said = capsys.readouterr()
  assert said.out.startswith(f"{tmp_path / 'hf'}: ")
  assert "experts in MXFP4: error 0 of the trained weights, RMS; at most 0 of the largest of a group" in said.err
  assert main(words) == 0
  assert "already holds this export, nothing written" in capsys.readouterr().err
  assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
  assert main(["verify", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0


def test_flags_of_the_other_kind_of_export_are_refused(run, five_layers, refused, tmp_path):
  step, config = run
  target = tmp_path / "hf"
  assert "--experts and --tokenizer-from given without --config" in refused(
    "export", five_layers, target, "--experts", "bf16", "--tokenizer-from", tmp_path
  )
  assert "unrecognized arguments: scan_layers=true" in refused("export", five_layers, target, "scan_layers=true")
  assert "--vision-from is of a conversion's export" in refused(
    "export", step, target, "--config", config, "--vision-from", tmp_path
  )
  assert "the config says false" in refused("export", step, target, "--config", config, "scan_layers=false")
  assert "no such file" in refused("export", step, target, "--config", tmp_path / "no.yml")
  assert "what `kimi-k3 convert` made is exported without --config" in refused(
    "export", five_layers, target, "--config", config
  )
  assert "no conversion.json" in refused("export", step, target)
  assert not target.exists()


@pytest.mark.slow
def test_a_trained_model_and_its_export_have_the_same_logits(run, tmp_path):
  step, config = run
  exact = ("dtype=float32", "matmul_precision=highest")
  (tmp_path / "rows.json").write_text("[[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]")
  assert main(["export", str(step), str(tmp_path / "hf"), "--config", str(config), "--experts", "bf16"]) == 0
  assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
  found = []
  for number, words in enumerate(((config, f"load_parameters_path={step}/items"), (tmp_path / "out/decode.yml",))):
    out = tmp_path / f"{number}.npz"
    rows = ["--tokens", str(tmp_path / "rows.json"), "--out", str(out)]
    assert main(["logits", *map(str, words), *rows, *exact]) == 0
    with np.load(out) as held:
      found.append(dict(held))
  assert np.abs(found[0]["logits_0"]).max() > 1
  for name in ("logits_0", "logits_1"):
    # One has float32 weights, the other the same in bfloat16, widened: the values are equal, the sums in one order.
    np.testing.assert_allclose(found[0][name], found[1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("verb", ["verify", "export"])
def test_help_shows_an_example(verb, capsys):
  with pytest.raises(SystemExit) as caught:
    main([verb, "--help"])
  assert caught.value.code == 0
  assert f"  kimi-k3 {verb} " in capsys.readouterr().out
