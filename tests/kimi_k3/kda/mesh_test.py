"""Heads on eight devices, a shard_map of local heads, answer as one device does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ON_MESH = Path(__file__).parent / "on_mesh.py"
# Heads are independent, so at most the order of sums differs: of float32, over a chunk.
TOLERANCE = 2e-6


def differences(name: str, tmp_path: Path) -> list[float]:
  answer = tmp_path / "answer.json"
  environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  command = [sys.executable, str(ON_MESH), str(answer), name]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  (found,) = json.loads(answer.read_text()).values()
  return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step:portable", "step:pallas", "chunk:portable", "chunk:tokamax_xla_chunked"])
def test_local_heads_under_shard_map_equal_one_device(name, tmp_path):
  assert max(differences(name, tmp_path)) <= TOLERANCE


@pytest.mark.slow
def test_outputs_and_all_gradients_of_rows_and_heads_in_a_shard_map_equal_one_device(tmp_path):
  found = differences("trained:tokamax_xla_chunked", tmp_path)
  assert len(found) == 9  # of eight arguments and the output
  assert max(found) <= TOLERANCE
