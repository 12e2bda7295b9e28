"""The expert decode kernel: its schedule as the TPU compiler made it, and its time where there is a TPU.

    python benchmarks/kernels/moe.py                                     K3 on 32 devices: 28 experts, 64 tokens
    python benchmarks/kernels/moe.py --experts 112 --width 768 --rows 8  experts by 8, their width by 4
    python benchmarks/kernels/moe.py --time                              on a TPU: against the reference, in turns

Needs libtpu, and no TPU but for --time. Bundles are those of the whole body of the grid's loop, parts that most steps
skip included (what is done once a visit, the pipeline's book-keeping): an upper bound, as long as HBM does not
wait. The clock is kimi_k3.capacity.schedule's. A visit is one expert with up to 8 of its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from kimi_k3.capacity import schedule, topology
from kimi_k3.config import FLOAT32_KINDS, ComputeConfig, KimiK3Config
from kimi_k3.moe import decode_kernel
from kimi_k3.moe.implementations import ExpertStack, form_of, prepare, run_experts
from kimi_k3.resources import demo_dir

LATENT, CHOICES, ALL_EXPERTS = 3584, 16, 896
CODE_BITS, GROUP = 4, 32
REPEATS = 20


def main() -> int:
  """Prints the figures."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rows", type=int, default=64, metavar="N", help="tokens (default: 64)")
  parser.add_argument("--experts", type=int, default=28, metavar="E", help="experts on the device (default: 28)")
  parser.add_argument("--width", type=int, default=3072, metavar="F", help="an expert's width there (default: 3072)")
  parser.add_argument("--layers", type=int, default=1, metavar="n", help="layers in the stack (default: 1)")
  parser.add_argument("--topology", default="tpu7x:2x2x1", help="what to compile for (default: tpu7x:2x2x1)")
  parser.add_argument("--time", action="store_true", help="time it on this machine's TPU, against the reference")
  args = parser.parse_args()
  sizes = {"rows": args.rows, "experts": args.experts, "width": args.width, "layers": args.layers}
  (print_times if args.time else print_schedule)(args.topology, sizes)
  return 0


def print_schedule(name: str, sizes: dict[str, int]) -> None:
  """Prints bundles, time of a visit and the busiest unit beside what HBM needs for an expert."""
  spec = f"{Path(__file__).resolve()}:compile_kernel"
  found = schedule.kernel_schedule(spec, decode_kernel.KERNEL_NAME, {"name": name, **sizes})
  kind = topology.device_kind(topology.tpu_mesh(name, {"x": 1}))
  blocks = decode_kernel.blocks_of(sizes["width"])
  body = found.hottest
  unit, full = body.busiest
  expert_bytes = 3 * LATENT * sizes["width"] * (CODE_BITS / 8 + 1 / GROUP)
  print(found.table())
  print(
    f"{json.dumps(sizes)} on {name}: {body.bundles} bundles a block, {blocks} blocks a visit, "
    f"{1e6 * blocks * body.seconds:.2f} us a visit; {unit} is busiest, {full:.0%} full; "
    f"HBM needs {1e6 * expert_bytes / kind.hbm_bytes_per_second:.2f} us for an expert"
  )


def compile_kernel(name: str, rows: int, experts: int, width: int, layers: int) -> None:
  """Compiles one call of the kernel for a topology: the function whose schedule is read."""
  mesh = topology.tpu_mesh(name, {"x": 1})
  form = form_of("decode_kernel", mesh.devices.flat[0].device_kind)

  def inputs():
    return (*tokens(rows, experts), stack(experts, width, layers, form), jnp.int32(0))

  shapes = jax.eval_shape(inputs)
  whole = jax.NamedSharding(mesh, jax.P())
  arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes)
  topology.compile_for(mesh, runner("decode_kernel"), arguments)


def print_times(name: str, sizes: dict[str, int]) -> None:
  """Times kernel and reference in turns on the same inputs and prints the medians.

  Raises:
    SystemExit: if this machine has no TPU.
  """
  del name
  kind = jax.devices()[0].device_kind
  if not kind.startswith("TPU"):
    raise SystemExit(f"--time needs a TPU, found {kind}: leave it out to read the compiler's schedule")
  rows, experts = sizes["rows"], sizes["experts"]
  inputs = jax.jit(tokens, static_argnums=(0, 1))(rows, experts)
  calls = {}
  for implementation in ("decode_kernel", "reference"):
    arrays = jax.jit(stack, static_argnums=(0, 1, 2, 3))(
      experts, sizes["width"], sizes["layers"], form_of(implementation, kind)
    )
    calls[implementation] = (jax.jit(runner(implementation)), (*inputs, arrays, jnp.int32(0)))
  seconds = {implementation: [] for implementation in calls}
  for turn in range(REPEATS + 1):
    for implementation, (call, arguments) in calls.items():
      start = time.perf_counter()
      call(*arguments).block_until_ready()
      if turn:  # the first compiles
        seconds[implementation].append(time.perf_counter() - start)
  hit = int(jnp.unique(inputs[1]).size) - 1
  medians = {implementation: statistics.median(times) for implementation, times in seconds.items()}
  for implementation, median in medians.items():
    print(
      f"{implementation}: {1e6 * median:.1f} us a call, {1e6 * median / max(hit, 1):.2f} us a hit expert ({hit} hit)"
    )
  print(f"reference / decode_kernel: {medians['reference'] / medians['decode_kernel']:.2f}, of {REPEATS} turns, {kind}")


def runner(implementation: str):
  """Returns a function (x, ids, weights, stack, layer) with K3's activation, in bfloat16."""
  released = json.loads((demo_dir() / "checkpoint" / "config.json").read_text())
  config = KimiK3Config.from_hf(released, packed_modules=("experts",), float32_leaves=FLOAT32_KINDS)
  compute = ComputeConfig(
    dtype="bfloat16",
    weight_dtype="bfloat16",
    precision="default",
    kda_implementation="portable",
    expert_implementation="decode_kernel",
  )

  def run(x, ids, weights, experts, layer):
    return run_experts(x, ids, weights, experts, layer, config=config, compute=compute, implementation=implementation)

  return run


def tokens(rows: int, experts: int):
  """Returns rows, choices among all experts of which the first are here, and combine weights."""
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (rows, LATENT), jnp.bfloat16)
  _, ids = jax.lax.top_k(jax.random.uniform(keys[1], (rows, ALL_EXPERTS)), CHOICES)
  return x, jnp.where(ids < experts, ids, experts), jax.random.uniform(keys[2], (rows, CHOICES))


def stack(experts: int, width: int, layers: int, form: str) -> ExpertStack:
  """Returns random experts in a form; scales that keep outputs near 1."""
  leaves = []
  for key, (out, into) in zip(
    jax.random.split(jax.random.key(1), 3), ((width, LATENT), (width, LATENT), (LATENT, width)), strict=True
  ):
    packed = jax.random.bits(key, (layers, experts, out, into * CODE_BITS // 8), jnp.uint8)
    scale = jnp.full((layers, experts, out, into // GROUP), 119, jnp.uint8)
    leaves += prepare(packed, scale, form)
  return ExpertStack(*leaves)


if __name__ == "__main__":
  sys.exit(main())
