"""The verb `inspect`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3.cli.main import main

REPO = Path(__file__).resolve().parents[3]


def test_a_released_checkpoint_is_printed_as_a_table(k3_tiny, capsys):
  assert main(["inspect", str(k3_tiny.checkpoint)]) == 0
  lines = {line[:26].strip(): line[27:] for line in capsys.readouterr().out.splitlines()}
  assert lines["released checkpoint"].endswith("3 shard(s), 1,504 tensors, 2,018,912 bytes (1.93 MiB)")
  assert lines["routed experts"] == "16 in 12 layer(s)"
  assert lines["layers"] == "9 KDA, 4 MLA (3, 7, 11, 12), 1 dense (0), 12 with experts"
  assert lines["packed pairs"] == "576: experts 576"
  assert lines["skipped, vision_tower.*"] == "9 tensors, 24,544 bytes (23.97 KiB): vision, not part of the text path"
  assert lines["parameters"] == "1,406,084, and 20,528 of vision"
  assert lines["convert"] == "accepted; scan: 4 leading layers, 2 blocks of 4, tail of 1"
  assert "Kimi K3's sizes" not in lines


def test_json_is_one_object(kimi_linear_tiny, capsys):
  assert main(["inspect", str(kimi_linear_tiny.checkpoint), "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert (found["schema"], found["what"]) == (1, "released checkpoint")
  assert found["total"] == {"tensors": 535, "bytes": 2408976}
  assert found["refused"] is None


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_refused_checkpoint_is_printed_with_the_refusal_and_exit_code_1(k3_tiny, tmp_path, capsys, flags):
  src = shutil.copytree(k3_tiny.checkpoint, tmp_path / "source")
  config = json.loads((src / "config.json").read_text())
  config["text_config"]["mixture_of_depths"] = True
  (src / "config.json").write_text(json.dumps(config))
  assert main(["inspect", str(src), *flags]) == 1
  said = capsys.readouterr().out
  assert "config.json: unknown key mixture_of_depths" in said
  assert "1,504 tensors" in said or json.loads(said)["total"]["tensors"] == 1504


def test_a_conversion_is_described(five_layers, tmp_path, capsys):
  assert main(["inspect", str(five_layers)]) == 0
  lines = {line[:26].strip(): line[27:] for line in capsys.readouterr().out.splitlines()}
  assert lines["options"] == "scan true, experts as-stored, dense as-stored"
  assert lines["layers"] == "scanned"
  assert lines["made by"].endswith("schema 2")
  out = shutil.copytree(five_layers, tmp_path / "out")
  record = json.loads((out / "conversion.json").read_text())
  (out / "conversion.json").write_text(json.dumps(record | {"leaves": 3}))
  assert main(["inspect", str(out)]) == 1
  assert f"{'FAULT':26} conversion.json says 3 leaves" in capsys.readouterr().out


def test_what_is_no_checkpoint_or_damaged_is_refused(refused, k3_tiny, tmp_path):
  assert "no such directory" in refused("inspect", tmp_path / "nowhere")
  assert "no checkpoint" in refused("inspect", tmp_path)
  src = shutil.copytree(k3_tiny.checkpoint, tmp_path / "source")
  (src / "model-00002-of-000003.safetensors").write_bytes(b"x")
  assert "model-00002-of-000003.safetensors: header" in refused("inspect", src)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
  return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow  # 15 s; in a process of its own, as the type checker of the tests would take minutes
def test_the_full_size_release_is_recognised_from_its_96_headers_in_bounded_memory(tmp_path):
  done = run(REPO / "scripts" / "synthetic_checkpoint.py", tmp_path / "k3", "--sparse", "--vision")
  assert done.returncode == 0, done.stderr
  program = (
    "import re, sys; from kimi_k3.cli.main import main\n"
    f"code = main(['inspect', {str(tmp_path / 'k3')!r}, '--json'])\n"
    # Not ru_maxrss, which takes over what the process was that started this one.
    "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1], file=sys.stderr); sys.exit(code)"
  )
  done = run("-c", program)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["release"] == []
  assert found["shards"] == 96
  assert {dtype: count["tensors"] for dtype, count in found["by_dtype"].items()} == {
    "BF16": 1_954,
    "F32": 506,
    "U8": 494_592,
  }
  assert found["total"]["tensors"] == 497_220
  assert found["packed_pairs"] == 247_296
  assert (len(found["layers"]["KDA"]), len(found["layers"]["MLA"])) == (69, 24)
  assert found["parameters"] == pytest.approx(2.7795e12, rel=2e-5)
  assert int(done.stderr.split()[-1]) < 1_200_000  # KiB; 0.63 GB here: half a million names, twice
