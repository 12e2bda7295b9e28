"""What a host reads of K3 at full size, by arithmetic: the converter's chunks, and the sharding of its devices."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from kimi_k3.capacity import topology
from kimi_k3.resources import configs_dir

GIB = 2**30


@pytest.mark.slow
def test_each_of_four_hosts_reads_27_percent_of_k3():
  from kimi_k3.convert import chunks, mapping
  from kimi_k3.maxtext_adapter.config import architecture
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model

  config = read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3"])
  model = build_model(config, topology.tpu_devices("tpu7x:2x2x4"))
  form = mapping.StoredForm(prefix="", packed_modules=("experts",), a_log_shape=(128,))
  leaves = mapping.leaves(architecture(config), form, scan=True)
  chunk_shapes = {".".join(leaf.path): chunks.chunk_shape(leaf) for leaf in leaves}
  assert chunk_shapes.keys() == model.stored_params.keys()

  total, once, each = 0, collections.Counter(), collections.Counter()
  for name, leaf in model.stored_params.items():
    total += math.prod(leaf.shape) * leaf.dtype.itemsize
    chunk = chunk_shapes[name]
    nbytes = math.prod(chunk) * leaf.dtype.itemsize
    touched: dict[int, np.ndarray] = {}
    parts = collections.defaultdict(set)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
      parts[device.process_index].add(
        tuple(
          (where.indices(size)[0] // step, -(-where.indices(size)[1] // step))
          for where, size, step in zip(index, leaf.shape, chunk, strict=True)
        )
      )
    for process, boxes in parts.items():
      grid = touched.setdefault(process, np.zeros([-(-s // c) for s, c in zip(leaf.shape, chunk, strict=True)], bool))
      for box in boxes:
        grid[tuple(slice(*edges) for edges in box)] = True
        each[process] += math.prod(stop - start for start, stop in box) * nbytes
      once[process] += int(grid.sum()) * nbytes
  assert len(once) == 4
  assert total / GIB == pytest.approx(1452.83, abs=0.01)
  # A quarter, what every device holds whole, and chunks of matrices cut by heads that two hosts need.
  assert {process: round(100 * n / total, 2) for process, n in once.items()} == dict.fromkeys(once, 26.87)
  # If TensorStore read a chunk again for every device of a host that needs it.
  assert max(each.values()) / total < 0.285
