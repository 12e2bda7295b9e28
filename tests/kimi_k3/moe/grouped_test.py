"""How rows reach the grouped product: sorted, in chunks, each group whole, nothing dropped."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.moe.grouped import grouped_experts
from kimi_k3.moe.packed import ExpertStack

EXPERTS, LATENT, CHOICES = 4, 32, 2


def times_expert_number(rows, weights, sizes, layer, /, *, activation):
  """A product that is easy to check: gate and up hand the rows on, down multiplies by 1 + the expert's number."""
  assert layer.shape == ()
  if activation is not None:
    assert len(weights) == 2
    return rows
  ends = jnp.cumsum(sizes)
  expert = jnp.sum(jnp.arange(rows.shape[0])[:, None] >= ends[None, :], axis=1)
  return jnp.where(expert[:, None] < EXPERTS, rows * (expert + 1)[:, None], jnp.nan)


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def run(config, compute, x, ids, weights, chunk_rows):
  leaf = jnp.zeros((1, EXPERTS, LATENT, LATENT), jnp.float4_e2m1fn), jnp.zeros((1, EXPERTS, 1, LATENT), jnp.uint8)
  stack = ExpertStack(*leaf * 3)
  settings = {"config": config, "compute": compute, "product": times_expert_number, "chunk_rows": chunk_rows}
  return grouped_experts(x, ids, weights, stack, jnp.int32(0), **settings)


# 24 tokens of 2 choices: a chunk of 16 ends inside a group, of 48 with the last pair, of 64 has room to spare.
@pytest.mark.parametrize("chunk_rows", [16, 48, 64])
@pytest.mark.parametrize(
  "of", [(0, 1, 2, 3), (1, 2), (0, 3), (0, EXPERTS), (EXPERTS, EXPERTS)], ids=["all", "inner", "outer", "one", "none"]
)
def test_every_pair_of_token_and_expert_is_computed_once(k3_config, float32_compute, chunk_rows, of):
  rng = np.random.default_rng(0)
  rows = 24
  x = rng.standard_normal((rows, LATENT)).astype(np.float32)
  weights = rng.random((rows, CHOICES)).astype(np.float32)
  ids = np.array([rng.permutation(of)[:CHOICES] for _ in range(rows)], np.int32)
  found = run(k3_config, float32_compute, x, ids, weights, chunk_rows)
  expected = x * np.sum(np.where(ids < EXPERTS, weights * (ids + 1), 0), axis=1, keepdims=True)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)  # two products of float32
