"""Eight devices have the loss and the gradients of one. Simulated devices, in a process of their own: on_devices.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ON_DEVICES = Path(__file__).parent / "on_devices.py"
DEVICES = 8
MESHES = [
  {"data": 8},
  {"fsdp": 8},
  {"expert": 8},
  {"fsdp": 2, "expert": 2, "tensor": 2},
  {"data": 2, "expert": 4},
  {"fsdp": 4, "tensor": 2},
]


def mesh_id(mesh: dict[str, int]) -> str:
  return "-".join(f"{axis}{size}" for axis, size in mesh.items())


@pytest.fixture(scope="module")
def batch(toys, documents, small_k3_loss) -> Any:
  """A row for each device, of unequal lengths, some packed, one empty."""
  rows = [[documents[3]], [documents[0], documents[1]], [documents[2], 7, documents[4]], [], *([d] for d in documents)]
  return toys.pack(rows[:DEVICES], small_k3_loss.shape)


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_eight_devices_have_the_loss_and_gradients_of_one(toys, small_k3, small_k3_loss, batch, mesh, tmp_path):
  settings = [f"ici_{axis}_parallelism={mesh.get(axis, 1)}" for axis in ("data", "fsdp", "expert", "tensor")]
  np.savez(tmp_path / "batch.npz", **batch)
  np.savez(tmp_path / "tensors.npz", **small_k3.tensors)
  (tmp_path / "request.json").write_text(json.dumps({"text_config": small_k3.text_config, "settings": settings}))
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
  command = [sys.executable, str(ON_DEVICES), str(tmp_path)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  answer = json.loads((tmp_path / "answer.json").read_text())
  gradients = dict(np.load(tmp_path / "gradients.npz"))
  assert answer["devices"] == DEVICES
  toys.assert_same(
    toys.Differentiated(**answer["sums"], gradients=gradients), small_k3_loss(small_k3.leaves(scan=False), batch)
  )
