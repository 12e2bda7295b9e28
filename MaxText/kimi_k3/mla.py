"""Absorbed attention on cached MLA latents: what decode does instead of building keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class CachedLatents(NamedTuple):
  """One part of the cache: latents [B, S, C], shared key tails [B, S, R], and which of the S a row may see [B, S]."""

  latent: Float[Array, "B S C"]
  tail: Float[Array, "B S R"]
  visible: Bool[Array, "B S"]


def absorbed_attention(
  nope: Float[Array, "B 1 H N"],
  tail: Float[Array, "B 1 H R"],
  to_key: Float[Array, "C H N"],
  to_value: Float[Array, "C H V"],
  parts: Sequence[CachedLatents],
  *,
  precision: Any,
) -> Float[Array, "B 1 H V"]:
  """Returns the attention output of one token a row over all cache parts, in the query's dtype.

  The parts are never joined: each gives scores, and one softmax spans them. A row that sees nothing gets 0.

  Args:
    nope: Query against the latents' keys, already scaled by the softmax scale.
    tail: Query against the shared tails, scaled.
    to_key: Key half of kv_b.
    to_value: Value half of kv_b.
    parts: Prefill and generated latents; what no row may see must be finite all the same, as its weight is 0.
    precision: Of the matrix products.
  """
  dtype = nope.dtype

  def product(spec, *operands, out=jnp.float32):
    return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=out)

  q_BHC = product("bthn,chn->bhc", nope, to_key, out=dtype)
  tail_BHR = tail[:, 0]
  scores = []
  for part in parts:
    s_BHS = product("bhc,bsc->bhs", q_BHC, part.latent) + product("bhr,bsr->bhs", tail_BHR, part.tail)
    scores.append(jnp.where(part.visible[:, None], s_BHS, -jnp.inf))
  largest_BH1 = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
  largest_BH1 = jnp.where(largest_BH1 == -jnp.inf, 0.0, largest_BH1)  # nothing to see
  weights = [jnp.exp(s - largest_BH1) for s in scores]
  total_BH1 = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
  o_BHC: Any = sum(product("bhs,bsc->bhc", w.astype(dtype), p.latent) for w, p in zip(weights, parts, strict=True))
  o_BHC = (o_BHC / jnp.where(total_BH1 == 0, 1.0, total_BH1)).astype(dtype)
  return product("bhc,chv->bhv", o_BHC, to_value, out=dtype)[:, None]
