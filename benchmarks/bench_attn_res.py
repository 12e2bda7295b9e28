"""Attention residuals: one mixing site over snapshots and the running stream, against a form that joins them first.

    python benchmarks/bench_attn_res.py --out attn-res.json
    python benchmarks/bench_attn_res.py --preset k3       released sizes

A model has 2 x layers + 1 such sites. The joined form is the formula as it is written down: a softmax over one array of
all candidates, which has to be made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import harness
import workloads
from checks import Work

TOLERANCE = 1e-2  # outputs are bfloat16, 8 bits; inside both compute in float32


def main(argv: Sequence[str]) -> int:
  """Runs the workloads of a preset."""
  parser = harness.parser(__doc__)
  harness.add_only(parser)
  args = parser.parse_args(argv)
  session = harness.session("attn_res", args)
  for work in harness.chosen(workloads.ATTN_RES, args):
    axes = {"batch": work.rows, "tokens": work.tokens, "snapshots": work.snapshots}
    subjects = [program(work, "apart", apart(work)), program(work, "joined", joined(work))]
    session.compare(work.name, subjects, tolerance=TOLERANCE, axes=axes)
  return session.finish()


def program(work: workloads.AttnRes, name: str, function: Any) -> harness.Program:
  """Returns the program of a form."""
  counted = Work(work.tokens, None, work.hbm_bytes, work.flops)
  return harness.Program(name, function, functools.partial(inputs, work), counted)


def apart(work: workloads.AttnRes) -> Any:
  """Returns what the model runs."""
  from kimi_k3.attn_res import attention_residual

  eps = workloads.model(work.preset).rms_norm_eps
  return lambda prefix, snapshots, count, query: attention_residual(prefix, snapshots, count, query, eps)


def joined(work: workloads.AttnRes) -> Any:
  """Returns the formula on one array [J + 1, B, T, D]."""
  import jax
  import jax.numpy as jnp

  eps = workloads.model(work.preset).rms_norm_eps

  def run(prefix, snapshots, count, query):
    values = jnp.concatenate([snapshots, prefix[None]]).astype(jnp.float32)
    keys = values * jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + eps)
    scores = jnp.einsum("jbtd,d->jbt", keys, query)
    number = jnp.arange(work.snapshots + 1)[:, None, None]
    seen = (number < count) | (number == work.snapshots)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=0)
    return jnp.einsum("jbt,jbtd->btd", weights, values).astype(prefix.dtype)

  return run


@functools.lru_cache(maxsize=2)
def inputs(work: workloads.AttnRes, number: int) -> tuple[Any, ...]:
  """Returns the stream, the snapshots, how many are filled, and norm times projection."""
  import jax
  import jax.numpy as jnp

  keys = jax.random.split(jax.random.key(number), 3)
  shape = (work.rows, work.tokens_a_row, work.hidden)
  prefix = jax.random.normal(keys[0], shape, jnp.bfloat16)
  snapshots = jax.random.normal(keys[1], (work.snapshots, *shape), jnp.bfloat16)
  query = jax.random.normal(keys[2], (work.hidden,)) / work.hidden**0.5
  return prefix, snapshots, jnp.int32(work.snapshots), query


if __name__ == "__main__":
  harness.exit_with(main, __file__)
