"""`kimi-k3 export`: what it says, what it refuses, and that a dry run writes nothing."""

from __future__ import annotations

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


@pytest.mark.parametrize("verb", ["verify", "export"])
def test_help_shows_an_example(verb, capsys):
  with pytest.raises(SystemExit) as caught:
    main([verb, "--help"])
  assert caught.value.code == 0
  assert f"  kimi-k3 {verb} " in capsys.readouterr().out
