"""The recurrent state of a KDA layer, as cache variables that MaxText's engine carries.

MaxEngine inserts a prefill's cache into a slot by the variables' names, so the two names here are its contract:
`recurrent_state` and `conv_state`, batch first. The MLA latents are in MaxText's own MlaKVCache.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.sharding import CACHE_BATCH, CACHE_BATCH_PREFILL, CACHE_HEADS

QKV = 3  # the convolution history holds the inputs of the q, k and v convolutions


class KDACache(nnx.Module):
  """`recurrent_state` [B, H, K, V] float32 and `conv_state` [B, W-1, 3, H, K], the last inputs of the convolutions.

  The history is kept in the compute dtype: it holds outputs of matrix products, which have that dtype.
  """

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, *, batch: int, prefill: bool):
    heads, size = config.kda_num_heads, config.kda_head_dim
    axis = CACHE_BATCH_PREFILL if prefill else CACHE_BATCH
    self.recurrent_state = nnx.Cache(
      jnp.zeros((batch, heads, size, size), jnp.float32), out_sharding=(axis, CACHE_HEADS, None, None)
    )
    self.conv_state = nnx.Cache(
      jnp.zeros((batch, config.kda_conv_width - 1, QKV, heads, size), compute.dtype),
      out_sharding=(axis, None, None, CACHE_HEADS, None),
    )
