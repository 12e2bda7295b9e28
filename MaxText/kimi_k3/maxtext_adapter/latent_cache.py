"""MaxText's cache of MLA latents, with decoding steps that write only to the rows that have a token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from maxtext.common.common_types import DECODING_ACTIVE_SEQUENCE_INDICATOR
from maxtext.inference import kvcache

from kimi_k3.mla import CachedLatents


class LatentCache(kvcache.MlaKVCache):
  """The same variables, so that MaxEngine inserts them: prompt latents, and a ring of generated ones.

  All rows share the ring's position. A row that enters later sees nothing of the ring before its own first token: its
  segment ids there are 0.
  """

  def append(
    self, latent: Float[Array, "B 1 C"], tail: Float[Array, "B 1 R"], active: Bool[Array, " B"]
  ) -> list[CachedLatents]:
    """Adds one token a row and returns the parts of the cache, prompt first. A row that is not active is left alone.

    Args:
      latent: Normalised latents of the new tokens.
      tail: Their shared key tails.
      active: Rows that have a token.
    """
    state: Any = self
    at = state.cache_ar_index[0]
    order = self.ar_cache_axis_order
    for cache, new in ((state.cached_ar_key, latent), (state.cached_ar_value, tail)):
      value = jnp.transpose(new[:, :, None], order).astype(cache.dtype)  # one head
      rows = active.reshape([-1 if axis == 0 else 1 for axis in order])
      cache[...] = _write(cache[...], value, at, axis=order.index(1), rows=rows)
    marks = jnp.full((active.shape[0], 1), DECODING_ACTIVE_SEQUENCE_INDICATOR, jnp.int32)
    state.cache_ar_segment_id[...] = _write(state.cache_ar_segment_id[...], marks, at, axis=1, rows=active[:, None])
    state.cached_ar_lengths[...] = state.cached_ar_lengths[...] + active
    state.cache_ar_index[...] = (state.cache_ar_index[...] + 1) % (self.max_target_length - self.max_prefill_length)
    prompt = (state.cached_prefill_key, state.cached_prefill_value, state.cache_prefill_segment_id)
    generated = (state.cached_ar_key, state.cached_ar_value, state.cache_ar_segment_id)
    return [_part(*prompt, self.prefill_cache_axis_order), _part(*generated, order)]


def _write(cache: Array, new: Array, at: Array, *, axis: int, rows: Array) -> Array:
  """The cache with `new` at `at` of an axis, in the chosen rows. The position is always inside: it counts modulo."""
  kept = jax.lax.dynamic_slice_in_dim(cache, at, 1, axis)
  return jax.lax.dynamic_update_slice_in_dim(cache, jnp.where(rows, new, kept), at, axis)


def _part(latent: Any, tail: Any, segment_ids: Any, order: tuple[int, ...]) -> CachedLatents:
  back = tuple(np.argsort(order).tolist())
  latents, tails = (jnp.transpose(x[...], back)[:, :, 0] for x in (latent, tail))
  return CachedLatents(latents, tails, segment_ids[...] == DECODING_ACTIVE_SEQUENCE_INDICATOR)
