"""The decode step of KDA: the compiler's schedule of its TPU kernel, or its time beside a copy of the same bytes.

    python benchmarks/kernels/kda.py                                   schedules of the cases below; no TPU needed
    python benchmarks/kernels/kda.py --topology v6e:2x2 --case 64x12   rows x heads
    python benchmarks/kernels/kda.py --time                            on a TPU or GPU: step and copy in turns

The schedule counts bundles, one a cycle, and no wait for HBM: the step is bound by HBM where its bundles take less than
moving the state once each way. `--time` names the implementation for the device: pallas on a TPU, portable on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from kimi_k3.capacity.schedule import CLOCK_HZ, kernel_schedule
from kimi_k3.capacity.topology import compile_for, device_kind, tpu_mesh
from kimi_k3.kda.step_kernel import _Plan, kda_step_stacked

WIDTH = 128  # key and value channels of a head
KDA_LAYERS = 69  # of K3
CASES = ("64x3", "64x6", "64x12", "1x96", "8x96", "64x96", "1x3", "8x3", "256x3")  # rows x heads
DEFAULT_TOPOLOGY = "tpu7x:2x2x1"
TIMED_LAYERS = 16  # in one program, so that its start does not count


def main() -> int:
  """Prints a line a case."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--case", action="append", metavar="ROWSxHEADS", help=f"default: {' '.join(CASES)}")
  parser.add_argument("--topology", default=DEFAULT_TOPOLOGY, help=f"of the schedule (default: {DEFAULT_TOPOLOGY})")
  parser.add_argument("--time", action="store_true", help="run on the device of this machine")
  parser.add_argument("--repeat", type=int, default=20, metavar="N", help="pairs of step and copy (default: 20)")
  args = parser.parse_args()
  for case in args.case or CASES:
    rows, heads = map(int, case.split("x"))
    print(timing(rows, heads, args.repeat) if args.time else schedule(rows, heads, args.topology), flush=True)
  return 0


def schedule(rows: int, heads: int, topology: str) -> str:
  """The schedule of one layer's step against the floor of HBM."""
  arguments = {"rows": rows, "heads": heads, "topology": topology}
  loop = kernel_schedule(f"{__file__}:compile_step", f"kda_step_{heads}_heads", arguments).hottest
  plan = _Plan.of(rows, heads, WIDTH, WIDTH)
  blocks, grid_groups = plan.grid
  items = blocks * grid_groups * plan.groups * -(-plan.block_rows // plan.item_rows)
  issued = items * loop.bundles / CLOCK_HZ
  floor = 2 * state_bytes(rows, heads) / device_kind(tpu_mesh(topology, {"x": 1})).hbm_bytes_per_second
  unit, full = loop.busiest
  bound = "HBM" if issued < floor else unit
  return (
    f"{topology} {rows:4} rows {heads:3} heads: {loop.bundles:5} bundles an item of {plan.item_rows} x "
    f"{plan.item_heads}, {loop.bundles / (plan.item_rows * plan.item_heads):5.1f} a head, {unit} {full:.0%} full; "
    f"{items:4} items {1e6 * issued:8.2f} us, HBM {1e6 * floor:8.2f} us: bound by {bound}; "
    f"{KDA_LAYERS} layers {1e3 * KDA_LAYERS * max(issued, floor):.3f} ms"
  )


def compile_step(rows: int, heads: int, topology: str) -> None:
  """Compiles one step on a stack of two layers."""
  mesh = tpu_mesh(topology, {"x": 1})
  shapes = arguments_of(rows, heads, 2)
  args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P())) for x in shapes]

  def step(q, k, v, g, beta, states, layer):
    return kda_step_stacked(q, k, v, g, beta, states, layer, active=None, implementation="pallas")

  compile_for(mesh, step, args, donate=(5,))


def arguments_of(rows: int, heads: int, layers: int) -> list[jax.ShapeDtypeStruct]:
  """Shapes of q, k, v, g, beta, states, layer."""
  token = jax.ShapeDtypeStruct((rows, heads, WIDTH), jnp.float32)
  return [
    *[token] * 4,
    jax.ShapeDtypeStruct((rows, heads), jnp.float32),
    jax.ShapeDtypeStruct((layers, rows, heads, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((), jnp.int32),
  ]


def state_bytes(rows: int, heads: int) -> int:
  """Of one layer."""
  return 4 * rows * heads * WIDTH * WIDTH


def timing(rows: int, heads: int, repeat: int) -> str:
  """Medians of a step and of a copy of as many bytes, run in turns, and their ratio."""
  platform = jax.default_backend()
  implementations = {"tpu": "pallas", "gpu": "portable"}
  if platform not in implementations:
    raise SystemExit(f"--time: a TPU or GPU is needed, the backend is {platform}: leave --time out for the schedule")
  implementation = implementations[platform]
  shapes = arguments_of(rows, heads, 1)[:5]
  q, k, v, g, beta = (jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(shapes))
  g, beta = -jnp.abs(g), jax.nn.sigmoid(beta)

  def step(states):
    def layer(states, i):
      o, states = kda_step_stacked(q, k, v, g, beta, states, i, active=None, implementation=implementation)
      return states, o

    return jax.lax.scan(layer, states, jnp.arange(TIMED_LAYERS, dtype=jnp.int32))[0]

  def copy(states):
    def layer(states, i):
      part = jax.lax.dynamic_index_in_dim(states, i, keepdims=False) + 1.0
      return jax.lax.dynamic_update_index_in_dim(states, part, i, 0), None

    return jax.lax.scan(layer, states, jnp.arange(TIMED_LAYERS, dtype=jnp.int32))[0]

  programs = [jax.jit(f, donate_argnums=0) for f in (step, copy)]
  shape = (TIMED_LAYERS, rows, heads, WIDTH, WIDTH)
  stacks, seconds = [jnp.zeros(shape, jnp.float32) for _ in programs], ([], [])
  for turn in range(repeat + 1):
    for i, program in enumerate(programs):
      start = time.perf_counter()
      stacks[i] = jax.block_until_ready(program(stacks[i]))
      if turn:  # the first one compiles
        seconds[i].append((time.perf_counter() - start) / TIMED_LAYERS)
  of_step, of_copy = map(statistics.median, seconds)
  return (
    f"{jax.devices()[0].device_kind} {rows:4} rows {heads:3} heads, {implementation}: step {1e6 * of_step:.2f} us, "
    f"copy {1e6 * of_copy:.2f} us ({2e-9 * state_bytes(rows, heads) / of_copy:.0f} GB/s), "
    f"ratio {of_copy / of_step:.2f}; medians of {repeat}"
  )


if __name__ == "__main__":
  sys.exit(main())
