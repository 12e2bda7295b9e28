"""Runs the manual partitioning on simulated devices, in a process that makes them: `on_devices.py REQUEST ANSWER`.

A request is {"converted", "cases": {name: settings}, "prompts", "steps", "unused": a token in no row}. For each case
the answer has the logits after each prompt, the greedy tokens, how often the step was traced, and of every parameter
and cache its bytes and those of one device. Every pad and every empty slot holds a token whose embedding is NaN.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kimi_k3.maxtext_adapter.engine import make_engine
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.moe import latent_moe

SLOTS = [5, 2, 7]
FORCED_FROM = 21  # tokens of the first prompt that are prefilled where its end is fed in steps


def answer(request: dict[str, Any], settings: list[str]) -> dict[str, Any]:
  prompts, steps, nan_token = request["prompts"], request["steps"], request["unused"]
  longest = -(-max(map(len, prompts)) // 16) * 16  # what eight devices cut into pieces of even size
  lengths = {"max_prefill_predict_length": longest, "max_target_length": longest + steps, "per_device_batch_size": 1}
  given = ["dtype=float32", "matmul_precision=highest", "partitioning=manual", *settings]
  engine = make_engine(read_config(f"{request['converted']}/decode.yml", given, **lengths))
  table = engine.params["token_embedder.embedding"]
  engine.params["token_embedder.embedding"] = jnp.where(
    jnp.arange(table.shape[0])[:, None] == nan_token, jnp.nan, table
  )

  def prefill(prompt: list[int]) -> Any:
    tokens = np.full(longest, nan_token, np.int32)
    tokens[: len(prompt)] = prompt
    return engine.prefill(tokens, len(prompt))

  waiting = [prefill(prompt) for prompt in prompts]
  logits = [np.asarray(prompt.logits) for prompt in waiting]
  forced = force(engine, prefill(prompts[0][:FORCED_FROM]), prompts[0], nan_token)
  ids = decode(engine, waiting, logits, steps, nan_token)
  held = {"params": engine.params, "caches": engine.cache}
  return {
    "logits": [row.tolist() for row in logits],
    "ids": ids,
    "forced": forced,
    "traces": engine._step.function._cache_size(),
    **{
      what: {name: [leaf.nbytes, shard_bytes(leaf)] for name, leaf in leaves.items()} for what, leaves in held.items()
    },
  }


def force(engine: Any, start: Any, prompt: list[int], nan_token: int) -> list[list[float]]:
  """Logits of a prompt whose end is fed in steps, alone in its slot, which is left with NaN in its caches."""
  slot, found = SLOTS[1], []
  engine.insert(start, slot)
  for token in [*prompt[FORCED_FROM:], nan_token]:
    tokens = np.full(engine.num_slots, nan_token)
    tokens[slot] = token
    found.append(np.asarray(engine.step(tokens)[slot]).tolist())
  engine.release(slot)
  return found[:-1]


def decode(engine: Any, waiting: list[Any], logits: list[np.ndarray], steps: int, nan_token: int) -> list[list[int]]:
  """Greedy tokens: row i enters at turn i, the second in the slot that another row has left."""
  slots = SLOTS
  ids: list[list[int]] = [[] for _ in waiting]
  for turn in range(steps + len(waiting)):
    if turn < len(waiting):
      engine.insert(waiting[turn], slots[turn])
      ids[turn].append(int(np.argmax(logits[turn])))
    tokens = np.full(engine.num_slots, nan_token)
    active = [i for i in range(len(waiting)) if i <= turn and len(ids[i]) < steps]
    for i in active:
      tokens[slots[i]] = ids[i][-1]
    found = np.asarray(engine.step(tokens))
    for i in active:
      ids[i].append(int(np.argmax(found[slots[i]])))
    for i, row in enumerate(ids):
      if i in active and len(row) == steps:
        engine.release(slots[i])
  return ids


def shard_bytes(leaf: Any) -> int:
  (size,) = {shard.data.nbytes for shard in leaf.addressable_shards}
  assert size == math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return size


def main() -> None:
  latent_moe._TOKENS_AT_A_TIME = 72  # so that a chunk goes to the experts in pieces, as a large one does
  request = json.loads(Path(sys.argv[1]).read_text())
  answers = {name: answer(request, settings) for name, settings in request["cases"].items()}
  Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
  main()
