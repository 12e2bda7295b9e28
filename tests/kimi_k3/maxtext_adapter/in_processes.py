"""One process of a run: `in_processes.py REQUEST ANSWER COORDINATOR,COUNT,ID`, with COUNT 1 all alone.

A request is {"converted", "settings", "prompts", "steps", "order": device ids in the order of the mesh or null,
"temperature": of a weighted run or null, "swaps": [[leaf, id, id]]}. The answer has the process's number, the tokens,
the bytes that loading read, and what the check of placement says of each swap.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from kimi_k3.errors import InputError
from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.loop import Request, generate, to_host
from kimi_k3.generate.sampling import SamplingOptions
from kimi_k3.maxtext_adapter import distributed
from kimi_k3.maxtext_adapter.checkpoint import bytes_read
from kimi_k3.maxtext_adapter.placement import check_placement
from kimi_k3.maxtext_adapter.settings import read_config
from kimi_k3.maxtext_adapter.spmd_engine import SpmdEngine


def answer(request: dict[str, Any], processes: distributed.Processes, events: dict[str, int]) -> dict[str, Any]:
  longest = max(map(len, request["prompts"])) + 7
  lengths = {"max_prefill_predict_length": longest, "max_target_length": longest + request["steps"]}
  config = read_config(
    f"{request['converted']}/decode.yml",
    ["dtype=float32", "matmul_precision=highest", "partitioning=manual", *request["settings"]],
    per_device_batch_size=1,
    **lengths,
  )
  processes.agree(distributed.what_decides(config, {}, request["prompts"], config.load_parameters_path))
  by_id = {device.id: device for device in jax.devices()}
  engine = SpmdEngine(config, "all", request["order"] and [by_id[number] for number in request["order"]])
  read = bytes_read()
  sampling = SamplingOptions(temperature=request["temperature"] or 0.0)
  requests = [Request(i, prompt, request["steps"], sampling) for i, prompt in enumerate(request["prompts"])]
  rows, _ = generate(engine, requests, stop_ids=(), clock=CompileClock(), seed=3)
  path = config.load_parameters_path
  return {
    "process": processes.number,
    "devices": [device.id for device in jax.local_devices()],
    "owners": [device.process_index for device in engine.model.mesh.devices.flat],
    "read": read,
    "stored": sum(leaf.nbytes for leaf in engine.params.values()),
    "ids": [row.ids for row in rows],
    "swaps": [said(path, engine.params[leaf], leaf, one, other) for leaf, one, other in request["swaps"]],
    "events": events,
  }


def said(path: str, leaf: jax.Array, name: str, one: int, other: int) -> str:
  """What the check says when two devices have each other's part; nothing if it is content."""
  whole, index = to_host(leaf), leaf.sharding.devices_indices_map(leaf.shape)
  parts = {device.id: whole[where] for device, where in index.items()}
  parts[one], parts[other] = parts[other], parts[one]
  here = [
    jax.device_put(parts[device.id], device) for device in leaf.sharding.addressable_devices_indices_map(leaf.shape)
  ]
  swapped = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, here)
  try:
    check_placement(path, {name: swapped}, "sample")
  except InputError as error:
    return str(error)
  return ""


def main(request: str, result: str, where: str) -> None:
  events: dict[str, int] = {}

  def count(event: str, **_: Any) -> None:
    if "/compilation_cache/" in event:
      events[event] = events.get(event, 0) + 1

  jax.monitoring.register_event_listener(count)
  address = distributed.parse_address(where)
  assert address is not None
  processes = distributed.ALONE if address.count == 1 else distributed.start(address, 120)
  Path(result).write_text(json.dumps(answer(json.loads(Path(request).read_text()), processes, events)))


if __name__ == "__main__":
  main(*sys.argv[1:])
