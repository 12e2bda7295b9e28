"""The recurrent state of a KDA layer: as cache variables that MaxText's engine carries, or a view of stacked arrays.

MaxEngine inserts a prefill's cache into a slot by the variables' names, so the two names here are its contract:
`recurrent_state` and `conv_state`, batch first. The MLA latents are in MaxText's own MlaKVCache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.sharding import CACHE_BATCH, CACHE_BATCH_PREFILL, CACHE_HEADS

# Half a step above the largest float8_e4m3fn, 448, and as a tie rounded down to it. What is larger has no number.
_E4M3_LIMIT = 464.0
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


@dataclasses.dataclass
class KDAStack:
  """One layer's caches inside arrays of n layers, for the length of a trace: assigning moves the arrays on.

  Attributes:
    recurrent_states: Float32, of n layers.
    conv_states: The last inputs of the convolutions, of n layers.
    layer: This one's index.
  """

  recurrent_states: Float[Array, "n B H K V"]
  conv_states: Float[Array, "n B Wm 3 H K"]
  layer: Int[Array, ""]

  @property
  def recurrent_state(self) -> Float[Array, "B H K V"]:
    """This layer's state."""
    return jax.lax.dynamic_index_in_dim(self.recurrent_states, self.layer, keepdims=False)

  @recurrent_state.setter
  def recurrent_state(self, state: Float[Array, "B H K V"]) -> None:
    self.recurrent_states = jax.lax.dynamic_update_index_in_dim(self.recurrent_states, state, self.layer, 0)

  @property
  def conv_state(self) -> Float[Array, "B Wm 3 H K"]:
    """This layer's histories."""
    return jax.lax.dynamic_index_in_dim(self.conv_states, self.layer, keepdims=False)

  @conv_state.setter
  def conv_state(self, histories: Float[Array, "B Wm 3 H K"]) -> None:
    histories = histories.astype(self.conv_states.dtype)
    self.conv_states = jax.lax.dynamic_update_index_in_dim(self.conv_states, histories, self.layer, 0)


@dataclasses.dataclass
class LatentStack:
  """One MLA layer's latents and shared key tails inside an array of n layers, for the length of a trace."""

  latents: Float[Array, "n B S P"]
  layer: Int[Array, ""]


def as_cached(latents: Float[Array, "*axes P"], dtype: Any) -> Float[Array, "*axes P"]:
  """Returns latents as a cache of this dtype holds them: each number the nearest one, ties to even.

  Attention reads what this returns for the new tokens too. So a token counts the same in every later step, in whatever
  chunks a prompt was run, and no result depends on who computed it first.

  There is no scale: the latent is RMS-normalised. A number beyond the largest of float8_e4m3fn (448) becomes NaN, as
  does the row's every logit from then on: it ends with an error, where a clamp would go on with another number.
  """
  dtype = jnp.dtype(dtype)
  if latents.dtype == dtype:
    return latents
  if dtype == jnp.float8_e4m3fn:
    # Said here and not left to the cast: a processor's own may clamp.
    latents = jnp.where(jnp.abs(latents) <= _E4M3_LIMIT, latents, jnp.nan)
  # A compiler may drop a cast to fewer bits that is followed by one back; not past a barrier.
  return jax.lax.optimization_barrier(latents.astype(dtype))
