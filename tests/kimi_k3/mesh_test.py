"""Several devices give the tokens of one. Simulated devices, each run in a process of its own that makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

MESHES = {
  "tensor-2-expert-2-fsdp-2": (8, ("ici_tensor_parallelism=2", "ici_expert_parallelism=2", "ici_fsdp_parallelism=2")),
  "tensor-4": (4, ("ici_tensor_parallelism=4", "ici_fsdp_parallelism=1")),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_greedy_tokens_are_those_of_one_device(mesh, k3_tiny, convert, tmp_path):
  devices, settings = MESHES[mesh]
  prompts, out = tmp_path / "prompts.json", tmp_path / "tokens.json"
  prompts.write_text(json.dumps(k3_tiny.prompts))
  command = [sys.executable, "-m", "kimi_k3", "decode", str(convert(k3_tiny.checkpoint, "--scan") / "decode.yml")]
  command += ["--prompt-ids", str(prompts), "--out", str(out), "--max-new-tokens", "32", "--ignore-eos"]
  command += ["dtype=float32", "matmul_precision=highest", *settings]
  environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
  run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
  assert run.returncode == 0, run.stderr
  assert [row["ids"] for row in json.loads(out.read_text())] == k3_tiny.greedy


def test_every_large_parameter_of_the_full_model_is_cut_by_its_mesh():
  """On 32 devices as tensor 4 x expert 8: what is left whole is small."""
  environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=32"}
  script = """
import json, math
from flax import nnx
from kimi_k3.maxtext_adapter.engine import abstract_model
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.resources import configs_dir
settings = ["model_name=kimi-k3", "ici_tensor_parallelism=4", "ici_expert_parallelism=8", "ici_fsdp_parallelism=1"]
_, model = abstract_model(read_config(str(configs_dir() / "decode.yml"), settings), "train")
rows = []
for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
  shard = leaf.sharding.shard_shape(leaf.shape)
  sizes = (math.prod(shape) * leaf.dtype.itemsize for shape in (leaf.shape, shard))
  rows.append((".".join(map(str, path)), *sizes))
print(json.dumps(rows))
"""
  run = subprocess.run(
    [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
  )
  assert run.returncode == 0, run.stderr
  rows = json.loads(run.stdout.splitlines()[-1])
  whole = [(name, size) for name, size, shard in rows if shard == size and size > 2**30]
  assert not whole, f"larger than 1 GiB on every device: {whole}"
  experts = [size / shard for name, size, shard in rows if ".experts." in name]
  assert set(experts) == {32.0}
  total, shards = np.array([[size, shard] for _, size, shard in rows], float).sum(axis=0)
  assert shards < total / 25
