"""One decoding step of MLA against cached latents, by context: every implementation that runs here, in turns.

    python benchmarks/bench_mla_decode.py --out mla-decode.json
    python benchmarks/bench_mla_decode.py --preset k3 --only '*S8192'     released sizes, on a TPU

A call walks a stack of layers, each of which needs the one in front of it. `benchmarks/kernels/mla.py` reads what the
TPU compiler makes of the same step, without a TPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import harness
import workloads
from checks import Work

from kimi_k3.mla_step import STEP_IMPLEMENTATIONS

# Both multiply bfloat16 and sum in float32; the weights of the softmax are rounded to bfloat16 at other scales: 8 bits.
TOLERANCE = 2e-2


def main(argv: Sequence[str]) -> int:
  """Runs the workloads of a preset."""
  parser = harness.parser(__doc__)
  harness.add_only(parser)
  args = parser.parse_args(argv)
  session = harness.session("mla_decode", args)
  for work in harness.chosen(workloads.MLA_DECODES, args):
    subjects = [step_program(work, name) for name in sorted(STEP_IMPLEMENTATIONS, key="portable".__ne__)]
    session.compare(work.name, subjects, tolerance=TOLERANCE, axes={"batch": work.rows, "context": work.context})
  return session.finish()


def step_program(work: workloads.MlaDecode, implementation: str) -> harness.Program:
  """Returns the program of a step of all layers: the cache is written in place, at each row's last position."""
  import jax
  import jax.numpy as jnp

  from kimi_k3.mla_step import latent_step

  def run(cache, q, new, positions):
    if implementation == "pallas":
      harness.needs_tpu("the MLA step 'pallas'")

    def layer(carry, i):
      q, cache = carry
      o, cache = latent_step(
        q, new, cache, i, positions,
        axes=(), cut="batch", num_values=work.latent, precision=None, implementation=implementation,
      )  # fmt: skip
      return (q.at[..., : work.latent].add(o), cache), None

    (q, cache), _ = jax.lax.scan(layer, (q, cache), jnp.arange(work.layers, dtype=jnp.int32))
    return cache, q

  def cache():
    shape = (work.layers, work.rows, work.allocated, work.latent + work.tail)
    return jax.random.normal(jax.random.key(9), shape, jnp.bfloat16)

  counted = Work(work.rows, None, work.hbm_bytes, work.flops)
  inputs = functools.partial(step_inputs, work)
  return harness.Program(implementation, run, inputs, counted, carry=cache, times=work.layers)


@functools.lru_cache(maxsize=2)
def step_inputs(work: workloads.MlaDecode, number: int) -> tuple[Any, ...]:
  """Returns queries against latents and tails, scaled; new latents; positions."""
  import jax
  import jax.numpy as jnp

  channels = work.latent + work.tail
  q = jax.random.normal(jax.random.key(number), (work.rows, work.heads, channels), jnp.bfloat16) / channels**0.5
  new = jax.random.normal(jax.random.key(number + 2), (work.rows, channels), jnp.bfloat16)
  return q, new, jnp.full(work.rows, work.context - 1, jnp.int32)


if __name__ == "__main__":
  harness.exit_with(main, __file__)
