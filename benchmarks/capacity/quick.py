"""Compiles programs of K3 whole and sets their memory beside the arithmetic of `kimi_k3.capacity.memory`.

  JAX_PLATFORMS=cpu python benchmarks/capacity/quick.py compile NAME...   # appends to the stored figures
  python benchmarks/capacity/quick.py show                                # every stored figure with its estimate

POINTS names what is compiled. A compile takes minutes. Rows marked `fit` made the constants of `capacity/memory.py`;
the others only test them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

GIB = 2**30
STORED = Path(__file__).parents[2] / "tests" / "kimi_k3" / "capacity" / "compiled.json"


@dataclasses.dataclass(frozen=True)
class Point:
  """A program to compile.

  Attributes:
    topology: Its name for libtpu.
    settings: Added to configs/tpu7x-32.yml, partition_mesh among them.
    program: "decode" or "prefill".
    sizes: batch, context and cache_cut of a decoding step; tokens, length and history of a chunk.
    fit: Whether the constants of the estimate were fitted to it.
    layers: Of the model; 0 is all.
  """

  topology: str
  settings: tuple[str, ...]
  program: str
  sizes: dict[str, Any]
  fit: bool = False
  layers: int = 0


def _decode(topology: str, mesh: str, batch: int, context: int, cut: str, *settings: str, **more: Any) -> Point:
  sizes = {"batch": batch, "context": context, "cache_cut": cut}
  return Point(topology, (f"partition_mesh={mesh}", *settings), "decode", sizes, **more)


def _prefill(topology: str, mesh: str, tokens: int, *settings: str, length: int = 0, **more: Any) -> Point:
  history = length > 0
  sizes = {"tokens": tokens, "length": length or tokens, "history": history}
  return Point(topology, (f"partition_mesh={mesh}", *settings), "prefill", sizes, **more)


LATENT = "partition_rules={latent: [tensor]}"
EP8_RULES = "partition_rules={experts: [expert], expert_width: [tensor]}"
V6E = ("prefill_expert_implementation=reference",)
POINTS = {
  "decode-tp32": _decode("tpu7x:2x2x4", "tensor=32", 64, 8192, "batch", fit=True),
  "prefill-tp32-32k": _prefill("tpu7x:2x2x4", "tensor=32", 32768, fit=True),
  "prefill-tp32-131k": _prefill("tpu7x:2x2x4", "tensor=32", 131072),
  "prefill-dp4-32k": _prefill("tpu7x:2x2x4", "attn_dp_expert=4,model=8", 32768),
  "prefill-tp32-16k": _prefill("tpu7x:2x2x4", "tensor=32", 16384),
  "prefill-tp32-65k": _prefill("tpu7x:2x2x4", "tensor=32", 65536),
  "prefill-tp32-32k-13": _prefill("tpu7x:2x2x4", "tensor=32", 32768, layers=13),
  "prefill-tp32-history": _prefill("tpu7x:2x2x4", "tensor=32", 32768, length=131072),
  "prefill-latent-32k": _prefill("tpu7x:2x2x4", "tensor=32", 32768, LATENT),
  "prefill-64-65k": _prefill("tpu7x:2x4x4", "attn_dp_expert=2,model=32", 65536),
  "prefill-128-32k": _prefill("tpu7x:4x4x4", "attn_dp_expert=4,model=32", 32768, fit=True),
  "decode-tp32-1m": _decode("tpu7x:2x2x4", "tensor=32", 32, 2**20, "sequence"),
  "decode-64-131k": _decode("tpu7x:2x4x4", "attn_dp_expert=2,model=32", 128, 131072, "sequence"),
  "decode-128-256": _decode("tpu7x:4x4x4", "attn_dp_expert=4,model=32", 256, 32768, "batch", fit=True),
  "decode-dp4-256": _decode("tpu7x:2x2x4", "attn_dp_expert=4,model=8", 256, 8192, "batch"),
  "decode-latent": _decode("tpu7x:2x2x4", "tensor=32", 64, 8192, "batch", LATENT),
  "decode-ep8": _decode("tpu7x:2x2x4", "expert=8,tensor=4", 64, 8192, "batch", EP8_RULES),
  "decode-v6e": _decode("v6e:8x16", "attn_dp_expert=4,model=32", 128, 8192, "batch", *V6E),
  "prefill-v6e-16k": _prefill("v6e:8x16", "attn_dp_expert=4,model=32", 16384, *V6E, fit=True),
}


def compile_point(point: Point, text: Path | None = None) -> dict[str, Any]:
  """Returns the point with the compiler's figures, bytes of one device."""
  from kimi_k3.capacity import topology
  from kimi_k3.maxtext_adapter.settings import read_config
  from kimi_k3.maxtext_adapter.spmd_engine import build_model
  from kimi_k3.resources import configs_dir
  from kimi_k3.spmd import programs

  config = read_config(str(configs_dir() / "tpu7x-32.yml"), ["model_name=kimi-k3", *point.settings])
  model = build_model(config, topology.tpu_devices(point.topology))
  if point.layers:
    model = model.shortened(point.layers)
  s = point.sizes
  if point.program == "decode":
    program = programs.decode_step(model, rows=s["batch"], length=s["context"], cut=s["cache_cut"])
  else:
    program = programs.prefill(
      model, rows=1, tokens=s["tokens"], length=s["length"], cut=config.prefill_cut, history=s["history"]
    )
  report = topology.compile_for(model.mesh, program.function, program.arguments)
  if text is not None:
    text.write_text(report.text)
  memory = dataclasses.asdict(report.memory) | {"total_bytes": report.memory.total_bytes}
  seconds = round(report.lower_seconds + report.compile_seconds)
  cut = {"mesh": dict(model.mesh.shape), "rules": config.partition_rules}
  return dataclasses.asdict(point) | cut | {"libtpu": topology.libtpu_version(), "memory": memory, "seconds": seconds}


def estimate(record: dict[str, Any]) -> Any:
  """Returns the estimate of a stored program."""
  import yaml

  from kimi_k3.capacity import memory, topologies
  from kimi_k3.maxtext_keys import from_maxtext
  from kimi_k3.resources import configs_dir
  from kimi_k3.spmd.cuts import Cuts

  config = from_maxtext(yaml.safe_load((configs_dir() / "models" / "kimi-k3.yml").read_text()))
  cuts = Cuts.of(record["mesh"], record["rules"])
  kind = topologies.parse_topology(record["topology"]).device_kind
  if record["program"] == "decode":
    return memory.estimate_decode(config, cuts, **record["sizes"], device_kind=kind)
  return memory.estimate_prefill(config, cuts, **record["sizes"], prefill_cut="sequence", device_kind=kind)


def show(stored: dict[str, dict[str, Any]]) -> None:
  """Prints each stored program with its estimate, in GiB a device, and the worst error."""
  errors = {}
  print(f"{'':22} {'topology':13} {'arguments':>17} {'temp':>15} {'total':>17} {'error':>7}")
  for name, record in stored.items():
    if record["layers"]:
      continue
    found, compiled = estimate(record), record["memory"]
    errors[name] = found.total_bytes / compiled["total_bytes"] - 1
    sizes = "".join(
      f" {compiled[f'{what}_bytes'] / GIB:8.3f} {getattr(found, f'{what}_bytes') / GIB:{width}.3f}"
      for what, width in (("argument", 8), ("temp", 6), ("total", 8))
    )
    print(f"{name:22} {record['topology']:13}{sizes} {errors[name]:+7.2%}{' fit' if record['fit'] else ''}")
  worst = max(errors, key=lambda name: abs(errors[name]))
  print(f"each compiled, then estimated; worst {errors[worst]:+.2%} ({worst})")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("verb", choices=("compile", "show"))
  parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(POINTS)}")
  parser.add_argument("--text", type=Path, help="a folder for the compiled texts")
  args = parser.parse_args()
  stored = json.loads(STORED.read_text()) if STORED.exists() else {}
  if args.verb == "show":
    show(stored)
    return
  for name in args.names:
    text = args.text / f"{name}.hlo" if args.text else None
    record = compile_point(POINTS[name], text)
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}  # another process may have added to it
    stored[name] = record
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    print(
      name, {key: round(value / GIB, 4) for key, value in record["memory"].items()}, record["seconds"], "s", flush=True
    )


if __name__ == "__main__":
  main()
