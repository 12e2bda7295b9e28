"""`kimi-k3 verify`: exit codes, what is printed, and a report that is whole or not there."""

from __future__ import annotations

import json
import shutil

import pytest
import tensorstore as ts

from kimi_k3.cli.main import main

FEW = ("--layers", "5", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
NORM = "decoder.decoder_norm.scale"


@pytest.fixture
def pair(tiny_checkpoint, five_layers, tmp_path):
  """The source of five_layers, and a copy of that conversion to damage."""
  return tiny_checkpoint(*FEW), shutil.copytree(five_layers, tmp_path / "out")


def test_a_conversion_that_is_right_exits_0_and_says_what_was_compared(pair, tmp_path, capsys):
  src, out = map(str, pair)
  report = tmp_path / "report.json"
  assert main(["verify", src, out, "--all", "--report", str(report), "--workers", "1"]) == 0
  said = capsys.readouterr().out.splitlines()
  assert "100 % of all" in said[0]
  assert said[-1] == "all equal"
  content = json.loads(report.read_text())
  assert list(content) == ["schema", "ok", "compared", "keys", "checks", "worst", "faults", "rounding", "seconds"]
  assert (content["schema"], content["ok"], content["faults"], content["worst"]) == (1, True, [], None)
  names = {"stale", "shards", "files", "keys", "values", "checksums"}
  assert {check["name"] for check in content["checks"] if check["ok"]} == names


def test_a_sample_never_says_that_all_is_equal(pair, capsys):
  src, out = map(str, pair)
  assert main(["verify", src, out, "--sample", "20"]) == 0
  said = capsys.readouterr().out
  assert "20 chunks" in said
  assert said.endswith("all that was compared is equal\n")
  assert "100 %" not in said


def test_faults_are_printed_one_a_line_and_counted_and_the_exit_code_is_1(pair, tmp_path, capsys):
  src, out = map(str, pair)
  kvstore = {"driver": "ocdbt", "base": f"file://{out}/0/items/"}
  for layer in range(4):
    for name in ("input_norm", "post_attention_norm", "mlp_res.norm"):
      leaf = f"params.params.decoder.lead_{layer}.{name}{'' if '.' in name else '.scale'}/"
      array = ts.open({"driver": "zarr3", "kvstore": kvstore | {"path": leaf}}, open=True).result()
      array[3] = 77
  report = tmp_path / "report.json"
  assert main(["verify", src, out, "--report", str(report)]) == 1
  said = capsys.readouterr().out.splitlines()
  faults = [line for line in said if line.startswith("  ")]
  assert len(faults) == 9
  assert faults[-1] == f"  and {len(json.loads(report.read_text())['faults']) - 8} more"
  assert "decoder.lead_0.input_norm.scale: 1 of 64 values differ" in "".join(faults)
  assert any(line.split() == ["values", "FAILED"] for line in said)
  assert said[-1] == "2 check(s) failed"


def test_bad_input_is_refused_before_the_work(pair, refused, tmp_path):
  src, out = pair
  assert "--sample is 0" in refused("verify", src, out, "--sample", "0")
  assert "--workers is -1" in refused("verify", src, out, "--workers", "-1")
  assert "not allowed with" in refused("verify", src, out, "--all", "--sample", "3")
  assert "its directory does not exist" in refused("verify", tmp_path / "no", out, "--report", tmp_path / "no/r.json")
  assert "is a directory" in refused("verify", tmp_path / "no", out, "--report", tmp_path)
  assert "no such directory" in refused("verify", tmp_path / "no", out)
  for inside in (src / "config.json", out / "conversion.json", out / "report.json"):
    assert "which is only read; choose another file" in refused("verify", src, out, "--report", inside)
  assert "nothing there" in refused("verify", src, tmp_path / "no")
  assert "no conversion.json" in refused("verify", src, src)
