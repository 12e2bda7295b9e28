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
  found = on_devices(toys, small_k3, batch, mesh, tmp_path, scan=False)
  toys.assert_same(found, small_k3_loss(small_k3.leaves(scan=False), batch))


def test_eight_devices_have_them_with_folded_layers(toys, batch, tmp_path):
  """Four leading layers and two blocks of four."""
  toy = toys.make_toy("k3", 12, attn_res_block_size=3)
  found = on_devices(toys, toy, batch, {"fsdp": 2, "expert": 2, "tensor": 2}, tmp_path, scan=True)
  rows, length = batch["inputs"].shape
  loss = toys.TrainerLoss(toy.config(tmp_path, scan=True, length=length, rows=rows))
  toys.assert_same(found, loss(toy.leaves(scan=True), batch), tolerance=toys.DEEP_TOLERANCE)


def on_devices(toys: Any, toy: Any, batch: Any, mesh: dict[str, int], directory: Path, *, scan: bool) -> Any:
  """Loss and gradients of a toy on a mesh."""
  settings = [f"ici_{axis}_parallelism={mesh.get(axis, 1)}" for axis in ("data", "fsdp", "expert", "tensor")]
  np.savez(directory / "batch.npz", **batch)
  np.savez(directory / "tensors.npz", **toy.tensors)
  request = {"text_config": toy.text_config, "settings": settings, "scan": scan}
  (directory / "request.json").write_text(json.dumps(request))
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
  command = [sys.executable, str(ON_DEVICES), str(directory)]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  answer = json.loads((directory / "answer.json").read_text())
  assert answer["devices"] == DEVICES
  return toys.Differentiated(**answer["sums"], gradients=dict(np.load(directory / "gradients.npz")))
