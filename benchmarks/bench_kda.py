"""KDA: chunks of tokens and single steps, every implementation that runs here, in turns.

    python benchmarks/bench_kda.py --out kda.json
    python benchmarks/bench_kda.py --preset k3 --only 'kda-step*'      released sizes, on a TPU or a GPU

The first of each workload is the portable form; the others are compared with it, in their results and in time. What
cannot run here is listed as absent, by name. Peers: tokamax's variants, and on a GPU fla (flash-linear-attention) where
it is installed. `benchmarks/kernels/kda.py` reads the TPU compiler's schedule of the step.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import harness
import workloads
from checks import Work

CHUNKED = ("portable", "tokamax_xla_chunked", "tokamax_mosaic", "tops")
STEPS = ("portable", "pallas")
# tokamax rounds what is between to bfloat16, 8 bits; the portable form computes in float32.
CHUNK_TOLERANCE = 2e-2
STEP_TOLERANCE = 1e-5  # both in float32: the order of sums over 128 channels
PEER = "fla"


def main(argv: Sequence[str]) -> int:
  """Runs the workloads of a preset."""
  parser = harness.parser(__doc__)
  harness.add_only(parser)
  args = parser.parse_args(argv)
  session = harness.session("kda", args)
  for work in harness.chosen(workloads.KDA_CHUNKS, args):
    subjects = [chunk_program(work, name) for name in CHUNKED]
    peers = fla_chunk(session, work)
    axes = {"batch": len(work.lengths), "tokens": work.tokens, "operation": "chunk"}
    padding = work.positions - work.tokens
    session.compare(work.name, [*subjects, *peers], tolerance=CHUNK_TOLERANCE, axes=axes, padding=padding)
  for work in harness.chosen(workloads.KDA_STEPS, args):
    subjects = [step_program(work, name) for name in STEPS]
    session.compare(
      work.name,
      [*subjects, *fla_step(session, work)],
      tolerance=STEP_TOLERANCE,
      axes={"batch": work.rows, "operation": "step"},
    )
  return session.finish()


def chunk_program(work: workloads.KdaChunk, implementation: str) -> harness.Program:
  """Returns the program of one layer's chunk, gate and normalisation included."""
  from kimi_k3.kda.kernel import run_kda

  gate = workloads.model(work.preset).kda_gate_lower_bound

  def run(q, k, v, a, a_log, dt_bias, beta, state, valid):
    return run_kda(
      q, k, v, a, a_log, dt_bias, beta, state,
      lower_bound=gate, valid=valid, resets=None, implementation=implementation,
    )  # fmt: skip

  counted = Work(work.tokens, work.lengths, work.hbm_bytes, work.flops)
  return harness.Program(implementation, run, functools.partial(chunk_inputs, work), counted)


@functools.lru_cache(maxsize=2)
def chunk_inputs(work: workloads.KdaChunk, number: int) -> tuple[Any, ...]:
  """Returns q, k, v, a in bfloat16, a_log, dt_bias, beta, state and which positions are tokens."""
  import jax
  import jax.numpy as jnp

  rows, length, heads, channels = len(work.lengths), work.padded, work.heads, work.channels
  keys = jax.random.split(jax.random.key(number), 7)
  q, k, v, a = (jax.random.normal(key, (rows, length, heads, channels), jnp.bfloat16) for key in keys[:4])
  a_log = jnp.log(jax.random.uniform(keys[4], (heads,), minval=1.0, maxval=16.0))
  beta = jax.nn.sigmoid(jax.random.normal(keys[5], (rows, length, heads)))
  state = jax.random.normal(keys[6], (rows, heads, channels, channels)) / channels
  valid = jnp.arange(length)[None] < jnp.asarray(work.lengths)[:, None]
  return q, k, v, a, a_log, jnp.zeros((heads, channels)), beta, state, valid


def step_program(work: workloads.KdaStep, implementation: str) -> harness.Program:
  """Returns the program of a step of all layers of the stack, each with a number of its own in its inputs."""
  import jax
  import jax.numpy as jnp

  from kimi_k3.kda.step_kernel import kda_step_stacked

  def run(states, q, k, v, g, beta):
    if implementation == "pallas":
      harness.needs_tpu("the KDA step 'pallas'")

    def layer(carry, i):
      states, q = carry
      o, states = kda_step_stacked(q, k, v, g, beta, states, i, active=None, implementation=implementation)
      return (states, q + 1e-3 * o), None  # so that no layer can be computed before the one in front of it

    (states, q), _ = jax.lax.scan(layer, (states, q), jnp.arange(work.layers, dtype=jnp.int32))
    return states, q

  def states():
    shape = (work.layers, work.rows, work.heads, work.channels, work.channels)
    return jax.random.normal(jax.random.key(9), shape) / work.channels

  counted = Work(work.rows, None, work.hbm_bytes, work.flops)
  inputs = functools.partial(step_inputs, work)
  return harness.Program(implementation, run, inputs, counted, carry=states, times=work.layers)


@functools.lru_cache(maxsize=2)
def step_inputs(work: workloads.KdaStep, number: int) -> tuple[Any, ...]:
  """Returns q, k, v, g, beta in float32."""
  import jax
  import jax.numpy as jnp

  keys = jax.random.split(jax.random.key(number), 5)
  q, k, v, g = (jax.random.normal(key, (work.rows, work.heads, work.channels)) for key in keys[:4])
  return q, k, v, -jnp.abs(g), jax.nn.sigmoid(jax.random.normal(keys[4], (work.rows, work.heads)))


def fla_chunk(session: harness.Session, work: workloads.KdaChunk) -> list[harness.Procedure]:
  """Returns fla's chunked KDA on the same inputs, where it is installed; without pads, as it has no mask."""
  modules = fla(session)
  if modules is None:
    return []
  if len(set(work.lengths)) > 1:
    session.absent(f"{PEER}, {work.name}", "rows of different length are another layout there (packed, cu_seqlens)")
    return []
  torch, ops = modules
  import jax

  from kimi_k3.kda.gate import decay_gate

  def given(number: int) -> list[Any]:
    q, k, v, a, a_log, dt_bias, beta, state, _ = chunk_inputs(work, number)
    gate = workloads.model(work.preset).kda_gate_lower_bound
    g = jax.jit(functools.partial(decay_gate, lower_bound=gate))(a, a_log, dt_bias)
    return [torch.from_dlpack(x) for x in (q, k, v, g, beta, state)]

  sets = [given(0), given(1)]

  def call(i: int):
    q, k, v, g, beta, state = sets[i % 2]
    settings = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    results = ops.chunk_kda(q, k, v, g, beta, **settings)
    torch.cuda.synchronize()  # JAX cannot wait for what torch has started
    return [jax.dlpack.from_dlpack(x.contiguous()) for x in results]

  return [harness.Procedure(PEER, call, Work(work.tokens, work.lengths, work.hbm_bytes, work.flops), compared=True)]


def fla_step(session: harness.Session, work: workloads.KdaStep) -> list[harness.Procedure]:
  """Returns fla's recurrent KDA for one token of each row, on as many layers, where it is installed."""
  modules = fla(session)
  if modules is None:
    return []
  torch, ops = modules
  import jax

  tokens = [[torch.from_dlpack(x)[:, None] for x in step_inputs(work, number)] for number in range(2)]
  shape = (work.layers, work.rows, work.heads, work.channels, work.channels)
  first = torch.from_dlpack(jax.random.normal(jax.random.key(9), shape) / work.channels)

  def call(i: int):
    q, k, v, g, beta = tokens[i % 2]
    states = []
    for layer in range(work.layers):
      o, state = ops.fused_recurrent_kda(
        q, k, v, g, beta, initial_state=first[layer], output_final_state=True, use_qk_l2norm_in_kernel=True
      )
      q = q + 1e-3 * o
      states.append(state)
    torch.cuda.synchronize()
    results = torch.stack(states), q[:, 0]
    return [jax.dlpack.from_dlpack(x.contiguous()) for x in results]

  counted = Work(work.rows, None, work.hbm_bytes, work.flops)
  return [harness.Procedure(PEER, call, counted, times=work.layers, compared=True)]


def fla(session: harness.Session) -> tuple[Any, Any] | None:
  """Returns torch and fla.ops.kda, where both are and there is a GPU; or notes the peer as absent."""
  import jax

  missing = [name for name in ("torch", "fla") if importlib.util.find_spec(name) is None]
  if missing:
    session.absent(PEER, f"{' and '.join(missing)} not installed")
    return None
  if jax.default_backend() != "gpu":
    session.absent(PEER, f"needs a GPU, the backend is {jax.default_backend()}")
    return None
  try:
    return importlib.import_module("torch"), importlib.import_module("fla.ops.kda")
  except ImportError as error:
    session.absent(PEER, error)
    return None


if __name__ == "__main__":
  harness.exit_with(main, __file__)
