"""The short convolution of a decode step, on a stack of layers' histories."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32


def short_conv_step_stacked(
  x: Float[Array, "B C H K"],
  taps: Float[Array, "C W H K"],
  conv_states: Float[Array, "n B W-1 C H K"],
  layer: Int32[Array, ""],
  active: Bool[Array, " B"] | None,
) -> tuple[Float32[Array, "B C H K"], Float[Array, "n B W-1 C H K"]]:
  """Returns each row's token after convolution and SiLU, and the stack with the histories of one layer moved on.

  The arithmetic is SiLU of `short_conv` with one token, for the C = 3 branches q, k, v together.

  A slice and an update, no kernel: compiled for a TPU with the stack in a scan's carry, both are fused with the work
  around them and touch one layer's part in place, as docs/decisions/0013-kda-on-devices.md shows.

  Args:
    x: Inputs of the branches.
    taps: Filter of each channel; the last tap multiplies the current token.
    conv_states: The W - 1 inputs before x, oldest first, of n layers.
    layer: Which of the n to use.
    active: Rows that have a token; None when all have. The others keep every bit, and their result has no meaning.
  """
  history = jax.lax.dynamic_index_in_dim(conv_states, layer, keepdims=False)
  width = taps.shape[1]
  y = x.astype(jnp.float32) * taps[None, :, width - 1].astype(jnp.float32)
  for w in range(width - 1):
    y = y + history[:, w].astype(jnp.float32) * taps[None, :, w].astype(jnp.float32)
  after = jnp.concatenate([history[:, 1:], x[:, None].astype(history.dtype)], axis=1)
  if active is not None:
    after = jnp.where(active[:, None, None, None, None], after, history)
  return jax.nn.silu(y), jax.lax.dynamic_update_index_in_dim(conv_states, after, layer, 0)
