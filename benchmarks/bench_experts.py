"""The routed experts of one device in MXFP4, by tokens and by how many experts are hit: every implementation, in turns.

    python benchmarks/bench_experts.py --out experts.json
    python benchmarks/bench_experts.py --preset k3 --only 'experts N512*'     released sizes, on a TPU or a GPU

Beside this package's implementations stands a peer that reads bfloat16: all experts decoded beforehand, multiplied by
`jax.lax.ragged_dot`. It moves four times the bytes, which is what packed experts are for; its bound is its own.
`benchmarks/kernels/moe.py` reads the TPU compiler's schedule of the decode kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import harness
import workloads
from checks import Work

from kimi_k3.moe.implementations import EXPERT_IMPLEMENTATIONS

# Products of bfloat16 with sums in float32, the hidden activation rounded to bfloat16 on the way: 8 bits.
TOLERANCE = 2e-2
PEER = "bf16, lax.ragged_dot"
_SCALE_BYTE = 122  # 2^-5: keeps outputs near 1 at these widths


def main(argv: Sequence[str]) -> int:
  """Runs the workloads of a preset."""
  parser = harness.parser(__doc__)
  harness.add_only(parser)
  args = parser.parse_args(argv)
  session = harness.session("experts", args)
  for work in harness.chosen(workloads.EXPERT_MATMULS, args):
    subjects = [*(packed_program(session, work, name) for name in EXPERT_IMPLEMENTATIONS), ragged_program(work)]
    axes = {"batch": work.tokens, "hit": work.hit, "held": work.held}
    session.compare(work.name, [one for one in subjects if one is not None], tolerance=TOLERANCE, axes=axes)
  return session.finish()


def packed_program(
  session: harness.Session, work: workloads.ExpertMatmul, implementation: str
) -> harness.Program | None:
  """Returns the program of an implementation, None where it has no form to read on this device."""
  import jax
  import jax.numpy as jnp

  from kimi_k3.errors import InputError
  from kimi_k3.moe.implementations import form_of, run_experts

  config, compute = workloads.model(work.preset), computing()
  try:
    form = form_of(implementation, jax.devices()[0].device_kind)
  except InputError as error:
    session.absent(implementation, error)
    return None
  if implementation == "grouped" and jax.default_backend() != "tpu":
    session.absent(implementation, "needs a TPU")
    return None

  def run(x, ids, weights, stack):
    return run_experts(
      x, ids, weights, stack, jnp.int32(0), config=config, compute=compute, implementation=implementation
    )

  def inputs(number: int) -> tuple[Any, ...]:
    return *tokens(work, number), stack_of(work, form)

  counted = Work(work.tokens, None, work.hbm_bytes, work.flops)
  return harness.Program(implementation, run, inputs, counted)


def ragged_program(work: workloads.ExpertMatmul) -> harness.Program:
  """Returns the peer: rows sorted by expert, three grouped products of decoded weights."""
  import jax
  import jax.numpy as jnp

  from kimi_k3.activations import gated_activation

  config = workloads.model(work.preset)

  def product(rows, matrices, sizes):
    return jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)

  def run(x, ids, weights, matrices):
    w1, w3, w2 = matrices
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)[: work.pairs]  # those of other devices come last
    token = order // work.choices
    sizes = jnp.zeros(work.held, jnp.int32).at[flat].add(1, mode="drop")
    rows = x[token]
    hidden = gated_activation(config, product(rows, w1, sizes), product(rows, w3, sizes)).astype(jnp.bfloat16)
    y = product(hidden, w2, sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(y)

  def inputs(number: int) -> tuple[Any, ...]:
    return *tokens(work, number), decoded(work)

  expert_bytes = 2 * 3 * work.latent * work.width
  moved = work.hbm_bytes - work.hit * (work.expert_bytes - expert_bytes)
  return harness.Program(PEER, run, inputs, Work(work.tokens, None, moved, work.flops))


@functools.cache
def computing() -> Any:
  """Returns bfloat16 arithmetic."""
  from kimi_k3.config import ComputeConfig

  return ComputeConfig(
    dtype="bfloat16",
    weight_dtype="bfloat16",
    precision="default",
    kda_implementation="portable",
    expert_implementation="reference",
  )


@functools.lru_cache(maxsize=2)
def tokens(work: workloads.ExpertMatmul, number: int) -> tuple[Any, ...]:
  """Returns inputs in bfloat16, the choices of the workload, and combine weights."""
  import jax
  import jax.numpy as jnp

  keys = jax.random.split(jax.random.key(number), 2)
  x = jax.random.normal(keys[0], (work.tokens, work.latent), jnp.bfloat16)
  ids = jnp.asarray(work.ids(), jnp.int32)
  return x, ids, jax.random.uniform(keys[1], ids.shape, minval=0.5)


@functools.lru_cache(maxsize=1)
def stored(held: int, latent: int, width: int) -> tuple[Any, ...]:
  """Returns random codes and equal scales of w1, w3, w2 as the checkpoint stores them, one layer."""
  import jax
  import jax.numpy as jnp

  from kimi_k3.config import MXFP4_GROUP

  leaves = []
  shapes = ((width, latent), (width, latent), (latent, width))
  for key, (out, into) in zip(jax.random.split(jax.random.key(1), 3), shapes, strict=True):
    leaves.append(jax.random.bits(key, (1, held, out, into // 2), jnp.uint8))
    leaves.append(jnp.full((1, held, out, into // MXFP4_GROUP), _SCALE_BYTE, jnp.uint8))
  return tuple(leaves)


@functools.lru_cache(maxsize=2)
def stack_of(work: workloads.ExpertMatmul, form: str) -> Any:
  """Returns the experts in a form."""
  import jax

  from kimi_k3.moe.implementations import ExpertStack, prepare

  leaves = stored(work.held, work.latent, work.width)
  lay_out = jax.jit(functools.partial(prepare, form=form))
  pairs = [lay_out(*leaves[i : i + 2]) for i in (0, 2, 4)]
  return ExpertStack(*(leaf for pair in pairs for leaf in pair))


@functools.lru_cache(maxsize=1)
def decoded(work: workloads.ExpertMatmul) -> tuple[Any, ...]:
  """Returns w1, w3 [E, L, F] and w2 [E, F, L] in bfloat16."""
  import jax
  import jax.numpy as jnp

  from kimi_k3 import mxfp4_jax

  leaves = stored(work.held, work.latent, work.width)

  def widen(packed, scale):
    # Expert by expert: what decoding holds beside its result is then of one.
    return jax.lax.map(lambda one: mxfp4_jax.decode(one[0], one[1], jnp.bfloat16).T, (packed[0], scale[0]))

  widen = jax.jit(widen)
  return tuple(widen(*leaves[i : i + 2]) for i in (0, 2, 4))


if __name__ == "__main__":
  harness.exit_with(main, __file__)
