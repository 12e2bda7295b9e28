"""`make demo`: the main job end to end, and the comparison that decides whether it worked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def rows_of(case: Any) -> list[dict]:
  """What decode writes of the golden continuations."""
  return [{"ids": ids, "text": text} for ids, text in zip(case.greedy, case.info["continuations"], strict=True)]


def compare(golden_dir: Path, rows: list[dict], tmp_path: Path) -> subprocess.CompletedProcess[str]:
  """Runs the demo's check on rows as `decode --out` writes them."""
  tokens = tmp_path / "tokens.json"
  tokens.write_text(json.dumps(rows))
  golden = golden_dir / "k3-nano" / "golden.npz"
  command = [sys.executable, SCRIPTS / "demo_golden.py", "check", golden, tokens]
  return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_demo_ends_with_its_speed_and_equals_the_golden_tokens(tmp_path):
  run = subprocess.run(
    ["bash", SCRIPTS / "demo.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
  )
  assert run.returncode == 0, run.stderr
  lines = run.stdout.splitlines()
  assert "tok/s" in lines[-1]
  assert any("all 144 tokens equal the golden greedy continuation" in line for line in lines)
  assert "#### 12" in lines  # 7 plus 5: text, not ids
  assert not list(tmp_path.iterdir()), "the demo wrote outside its own directory"


def test_golden_tokens_pass_the_comparison(k3_nano, golden_dir, tmp_path):
  rows = rows_of(k3_nano)
  run = compare(golden_dir, rows, tmp_path)
  assert run.returncode == 0, run.stderr
  assert "all 144 tokens" in run.stdout


@pytest.mark.parametrize("fault", ["another token", "a token too few", "a row too few"])
def test_other_tokens_fail_the_comparison(fault, k3_nano, golden_dir, tmp_path):
  rows = rows_of(k3_nano)
  if fault == "another token":
    rows[1]["ids"][20] ^= 1
  elif fault == "a token too few":
    rows[1]["ids"].pop()
  else:
    rows.pop()
  run = compare(golden_dir, rows, tmp_path)
  assert run.returncode == 1
  assert ("2 rows, expected 3" if fault == "a row too few" else "prompt 1") in run.stderr


def test_a_fault_of_a_step_is_shown_and_fails_the_demo(tmp_path):
  checkout = fake_checkout(tmp_path, "echo 'no such tensor' >&2; exit 2")
  run = subprocess.run([checkout / "scripts" / "demo.sh"], capture_output=True, text=True, timeout=60, check=False)
  assert run.returncode == 2
  assert "no such tensor" in run.stderr
  assert "failed with exit code 2" in run.stderr


def test_a_decode_without_a_speed_fails_the_demo(k3_nano, tmp_path):
  (tmp_path / "right.json").write_text(json.dumps(rows_of(k3_nano)))
  checkout = fake_checkout(tmp_path, f'[ "$1" = convert ] || cp {tmp_path}/right.json tokens.json')
  run = subprocess.run([checkout / "scripts" / "demo.sh"], capture_output=True, text=True, timeout=60, check=False)
  assert run.returncode == 1
  assert "no line with tok/s" in run.stderr


def fake_checkout(tmp_path: Path, kimi_k3: str) -> Path:
  """Returns a checkout with the demo's scripts and a `kimi-k3` that is the given line of shell."""
  checkout = tmp_path / "checkout"
  bin_dir = checkout / ".venv" / "bin"
  bin_dir.mkdir(parents=True)
  (checkout / "scripts").mkdir()
  (checkout / "tests").symlink_to(SCRIPTS.parent / "tests")
  for name in ("demo.sh", "demo_golden.py"):
    shutil.copy(SCRIPTS / name, checkout / "scripts" / name)
  for name, script in {"kimi-k3": kimi_k3, "python": f'exec {sys.executable} "$@"'}.items():
    (bin_dir / name).write_text(f"#!/bin/sh\n{script}\n")
    (bin_dir / name).chmod(0o755)
  return checkout
