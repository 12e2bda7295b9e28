"""Loss and gradients of a toy on a mesh of simulated devices: `on_devices.py DIRECTORY`.

Reads there request.json {"text_config", "settings", "scan"}, tensors.npz and batch.npz; writes answer.json and
gradients.npz.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import toys


def main(directory: Path) -> None:
  request = json.loads((directory / "request.json").read_text())
  toy = toys.Toy(request["text_config"], dict(np.load(directory / "tensors.npz")))
  scan = request["scan"]
  batch = dict(np.load(directory / "batch.npz"))
  rows, length = batch["inputs"].shape
  devices = jax.device_count()
  config = toy.config(directory, *request["settings"], scan=scan, length=length, rows=rows, devices=devices)
  found = toys.TrainerLoss(config)(toy.leaves(scan=scan), batch)
  np.savez(directory / "gradients.npz", allow_pickle=False, **found.gradients)
  sums = {"loss": found.loss, "xent_sum": found.xent_sum, "weights": found.weights}
  (directory / "answer.json").write_text(json.dumps({"devices": devices, "sums": sums}))


if __name__ == "__main__":
  main(Path(sys.argv[1]))
