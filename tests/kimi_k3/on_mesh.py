"""Runs cases on a mesh of simulated devices, in a process that makes them: `on_mesh.py REQUEST.json ANSWER.json`.

A request is {"converted", "settings", "prompts", "new_tokens"}; its answer has the logits after each prompt, the greedy
tokens, how often each program was traced, and of every parameter and cache how many bytes it has and how many of them
each device holds.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.lengths import bucket
from kimi_k3.generate.loop import Request, generate
from kimi_k3.maxtext_adapter.engine import Engine, abstract_model
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.resources import configs_dir


def answer(request: dict[str, Any]) -> dict[str, Any]:
  prompts, new = request["prompts"], request["new_tokens"]
  longest = max(map(len, prompts))
  lengths = {"max_prefill_predict_length": longest, "max_target_length": longest + new, "per_device_batch_size": 1}
  settings = ["dtype=float32", "matmul_precision=highest", *request["settings"]]
  engine = Engine(read_config(f"{request['converted']}/decode.yml", settings, **lengths))
  logits = []
  for prompt in prompts:
    tokens = np.zeros(bucket(len(prompt), longest), np.int32)
    tokens[: len(prompt)] = prompt
    logits.append(np.asarray(engine.prefill(tokens, len(prompt)).logits).tolist())
  requests = [Request(i, prompt, new) for i, prompt in enumerate(prompts)]
  rows, _ = generate(engine, requests, stop_ids=(), clock=CompileClock())
  params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(engine.params)}
  caches = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(engine.cache)}
  jitted = ("_prefill_jit", "_insert_jit", "_decoding", "_release")
  return {
    "programs": {name: getattr(engine._engine, name)._cache_size() for name in jitted},
    "logits": logits,
    "ids": [row.ids for row in rows],
    "params": {name: held(leaf) for name, leaf in params.items()},
    "caches": {name: held(leaf) for name, leaf in caches.items()},
  }


def held(leaf: jax.Array) -> list[int]:
  """All bytes, and those of each device's shard, which must be equal."""
  (size,) = {shard.data.nbytes for shard in leaf.addressable_shards}
  assert size == math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return [leaf.nbytes, size]


def full_size(settings: list[str]) -> dict[str, list[int]]:
  """The same of the released model, from its shapes alone."""
  config = read_config(str(configs_dir() / "decode.yml"), ["model_name=kimi-k3", *settings])
  _, model = abstract_model(config, "train")
  shapes = {}
  for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    shard = leaf.sharding.shard_shape(leaf.shape)
    shapes[".".join(map(str, path))] = [math.prod(s) * leaf.dtype.itemsize for s in (leaf.shape, shard)]
  return shapes


def main() -> None:
  request = json.loads(Path(sys.argv[1]).read_text())
  result = answer(request) if "converted" in request else full_size(request["settings"])
  Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
  main()
