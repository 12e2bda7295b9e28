"""MLA at K3's sizes as the TPU compiler sees it: memory, HBM traffic, collectives and compile time. No TPU is needed.

    python benchmarks/kernels/mla.py                          every workload below
    python benchmarks/kernels/mla.py --only 'step v6e*'       those whose name matches

A step is a scan over 22 layers with the stacked cache in its carry, each row at the end of what is allocated. A prefill
is two such layers: attention of the chunk, after history where there is any, and the write into the cache. Bytes are a
layer's on one device. Nothing runs: time is not measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kimi_k3.capacity.hlo import KernelCall, Program, collectives, hbm_bytes, layer_of_stack, parse
from kimi_k3.capacity.topology import Report, compile_for, tpu_mesh
from kimi_k3.mla_flash import BLOCK
from kimi_k3.mla_prefill import HISTORY_BLOCK, WRITE_BLOCK, latent_prefill, write_chunk
from kimi_k3.mla_step import latent_step

LATENT, TAIL, NOPE, VALUE = 512, 64, 128, 128
CHANNELS = LATENT + TAIL
LANES = 128
STEP_LAYERS, PREFILL_LAYERS = 22, 2
AXES = ("x",)


@dataclasses.dataclass(frozen=True)
class Step:
  """One token of each row: `heads` and `allocated` positions over all devices."""

  topology: str
  devices: int
  rows: int
  allocated: int
  cut: str
  heads: int = 96
  implementation: str = "pallas"

  def __str__(self) -> str:
    kind = self.topology.split(":")[0]
    shape = f"{self.rows} x {self.allocated}, {self.heads} heads on {self.devices}"
    return f"step {kind} {shape}, {self.cut}, {self.implementation}"


@dataclasses.dataclass(frozen=True)
class Prefill:
  """A chunk of one row, with a history that fills the cache but for the chunk, or with none."""

  topology: str
  devices: int
  tokens: int
  allocated: int
  history: bool
  heads: int = 96
  implementation: str = "flash"

  def __str__(self) -> str:
    kind, before = self.topology.split(":")[0], self.history_tokens
    shape = f"{self.tokens} after {before}, {self.heads} heads on {self.devices}"
    return f"prefill {kind} {shape}, {self.implementation}"

  @property
  def history_tokens(self) -> int:
    return self.allocated - self.tokens if self.history else 0


STEPS = (
  Step("tpu7x:2x2x4", 32, 64, 8192, "sequence"),
  Step("tpu7x:2x2x4", 32, 64, 8192, "batch"),
  Step("tpu7x:2x2x4", 32, 1, 2**20, "sequence"),
  Step("tpu7x:2x2x4", 32, 32, 2**20, "batch"),
  Step("tpu7x:2x2x1", 1, 4, 8192, "batch", heads=3),
  Step("tpu7x:2x2x4", 32, 64, 8192, "batch", implementation="portable"),
  Step("tpu7x:2x2x4", 32, 1, 2**20, "sequence", implementation="portable"),
  Step("v6e:2x4", 8, 8, 8192, "batch"),
  Step("v6e:2x4", 8, 8, 8192, "sequence"),
)
PREFILLS = (
  Prefill("tpu7x:2x2x4", 32, 32768, 2**20, history=False),
  Prefill("tpu7x:2x2x4", 32, 131072, 2**20, history=False),
  Prefill("tpu7x:2x2x4", 32, 32768, 2**18, history=True),
  Prefill("tpu7x:2x2x4", 32, 32768, 2**20, history=True),
  Prefill("tpu7x:2x2x1", 1, 8192, 16384, history=True, heads=3),
  Prefill("tpu7x:2x2x1", 1, 8192, 16384, history=True, heads=6),
  Prefill("tpu7x:2x2x1", 1, 8192, 16384, history=True, heads=12),
  Prefill("tpu7x:2x2x1", 1, 8192, 16384, history=True, heads=96),
  Prefill("v6e:2x4", 8, 8192, 2**17, history=False),
  Prefill("v6e:2x4", 8, 8192, 2**17, history=True),
)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A workload's program: what it takes, its text, and bytes that a layer must move on one device at the least."""

  report: Report
  program: Program
  layers: int
  least_bytes: int
  kernels: dict[str, Any]
  loops: dict[str, int]


def compile_step(work: Step) -> Compiled:
  """Returns the compiled scan over STEP_LAYERS layers."""
  mesh, spec = tpu_mesh(work.topology, {"x": work.devices}), PartitionSpec
  by_head = spec(None, AXES)
  by_cut = spec(None, None, AXES) if work.cut == "sequence" else spec(None, AXES)

  def layers_of(q, new, cache, positions):
    def layer_of(carry, layer):
      q, cache = carry
      options: dict[str, Any] = dict(
        cut=work.cut, num_values=LATENT, precision=None, implementation=work.implementation
      )
      o, cache = latent_step(q, new, cache, layer, positions, axes=AXES, **options)
      return (q.at[..., :LATENT].add(o), cache), None

    return jax.lax.scan(layer_of, (q, cache), jnp.arange(STEP_LAYERS, dtype=jnp.int32))[0]

  specs = (by_head, spec(), by_cut, spec())
  shapes = (
    (work.rows, work.heads, CHANNELS),
    (work.rows, CHANNELS),
    (STEP_LAYERS, work.rows, work.allocated, CHANNELS),
    (work.rows,),
  )
  function = jax.shard_map(layers_of, mesh=mesh, in_specs=specs, out_specs=(by_head, by_cut), check_vma=False)
  report = compile_for(mesh, function, _arrays(mesh, shapes, specs), donate=(2,))
  here = work.allocated // work.devices if work.cut == "sequence" else work.allocated
  writers = work.rows / work.devices / (work.rows if work.cut == "sequence" else work.rows // work.devices)
  # Operand 6 is the cache, after four prefetched scalars, q and the new latents; result 2 takes its memory, and gets
  # one tile of 128 positions of each row that this device writes.
  kernels = {"latent_step": layer_of_stack({6}, share={-3: writers * LANES / here})} if _is_kernel(work) else {}
  least = 2 * work.rows * work.allocated * CHANNELS // work.devices
  return Compiled(report, parse(report.text), STEP_LAYERS, least, kernels, {})


def compile_prefill(work: Prefill) -> Compiled:
  """Returns the compiled scan over PREFILL_LAYERS layers, each with a chunk of its own."""
  mesh, spec = tpu_mesh(work.topology, {"x": work.devices}), PartitionSpec
  third, second = spec(None, None, AXES), spec(None, AXES)

  def layers_of(q, chunk, to_key, to_value, cache, start, lengths):
    def layer_of(carry, layer):
      q, chunk, cache = carry
      arguments = (layer, start, lengths)
      options: dict[str, Any] = dict(precision=None, implementation=work.implementation, history=work.history)
      o = latent_prefill(q, chunk, to_key, to_value, cache, *arguments, axes=AXES, **options)
      cache = write_chunk(cache, chunk, *arguments, axes=AXES)
      return (q.at[..., :VALUE].add(o), chunk * 2, cache), None

    return jax.lax.scan(layer_of, (q, chunk, cache), jnp.arange(PREFILL_LAYERS, dtype=jnp.int32))[0]

  specs = (third, spec(), second, second, third, spec(), spec())
  shapes = (
    (1, work.tokens, work.heads, NOPE + TAIL),
    (1, work.tokens, CHANNELS),
    (LATENT, work.heads, NOPE),
    (LATENT, work.heads, VALUE),
    (PREFILL_LAYERS, 1, work.allocated, CHANNELS),
    (1,),
    (1,),
  )
  function = jax.shard_map(layers_of, mesh=mesh, in_specs=specs, out_specs=(third, spec(), third), check_vma=False)
  report = compile_for(mesh, function, _arrays(mesh, shapes, specs), donate=(0, 1, 4))
  here = work.allocated // work.devices
  loops = {"*/write_chunk/*": -(-min(work.tokens, here) // WRITE_BLOCK)}
  if work.history:
    loops["*/mla_history/while"] = -(-work.history_tokens // HISTORY_BLOCK)
  kernels = {}
  if _is_kernel(work):
    kernels = {"flash_causal": _flash_bytes} | ({"flash_all": _flash_bytes} if work.history else {})
  heads = work.heads // work.devices
  # Queries in, output out, the chunk in and into the cache, the history once.
  tokens = heads * (NOPE + TAIL + VALUE) * work.tokens + CHANNELS * (2 * work.tokens + work.history_tokens)
  return Compiled(report, parse(report.text), PREFILL_LAYERS, 2 * tokens, kernels, loops)


def _is_kernel(work: Step | Prefill) -> bool:
  return work.implementation != "portable"


def _flash_bytes(call: KernelCall) -> tuple[float, float]:
  """A flash kernel reads its keys and values again for each block of queries, half of them on average if causal."""
  q, *keys = call.operands[2:6]
  count = -(-q.dims[-1] // BLOCK)
  again = (count + 1) / 2 if call.name == "flash_causal" else count
  # Rows and heads are the first axes of all but the tail, which every head reads.
  read = sum(array.hbm_bytes * (q.dims[1] if len(array.dims) == 3 else 1) for array in keys) * again
  rest = sum(array.hbm_bytes for array in (q, *call.operands[6:]))
  return read + rest, sum(array.hbm_bytes for array in call.results)


def _arrays(mesh: Any, shapes: Any, specs: Any) -> list[jax.ShapeDtypeStruct]:
  """Arrays of one axis are indices; all others are bfloat16."""
  return [
    jax.ShapeDtypeStruct(shape, jnp.int32 if len(shape) == 1 else jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, specs, strict=True)
  ]


def row(work: Step | Prefill) -> str:
  """Returns one line of the table."""
  compiled = compile_step(work) if isinstance(work, Step) else compile_prefill(work)
  memory, mib = compiled.report.memory, 2**20
  traffic = hbm_bytes(compiled.program, compiled.kernels, compiled.loops)
  found = collectives(compiled.program, compiled.loops)
  calls = sum(c.calls for c in found) / compiled.layers
  sent = sum(c.calls * c.bytes for c in found) / compiled.layers
  moved = traffic.total / compiled.layers
  seconds = f"{compiled.report.lower_seconds:.1f} + {compiled.report.compile_seconds:.1f}"
  return (
    f"| {work} | {memory.argument_bytes / mib:.1f} | {memory.temp_bytes / mib:.2f} | {moved / mib:.1f} | "
    f"{compiled.least_bytes / mib:.1f} | {calls:.0f} | {sent / 1e6:.2f} | {seconds} |"
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", default="*", metavar="PATTERN", help="workloads whose name matches (default: all)")
  options = parser.parse_args()
  print(
    "| workload | arguments MiB | temp MiB | HBM MiB a layer | of which needed | collectives a layer | MB a layer "
    "| lower + compile s |\n|---|---|---|---|---|---|---|---|"
  )
  for work in (*STEPS, *PREFILLS):
    if fnmatch.fnmatchcase(str(work), options.only):
      print(row(work), flush=True)


if __name__ == "__main__":
  main()
