"""The causal depthwise convolution in front of q, k and v, and the history it keeps between calls."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped


def short_conv(
  x: Float[Array, "B T *C"],
  taps: Float[Array, "W *C"],
  history: Float[Array, "B W-1 *C"] | None,
  *,
  valid: Bool[Array, "B T"] | None = None,
  resets: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T *C"], Float[Array, "B W-1 *C"]]:
  """Returns y_t = sum over w of taps[w] * x_(t - W + 1 + w) a channel, and the inputs to keep for the next call.

  There is no bias and no activation: the caller applies SiLU.

  Args:
    x: Inputs; the channel axes (*C) may be one axis or heads and head channels.
    taps: Filter of each channel; the last tap multiplies the current token.
    history: The W - 1 inputs before x, oldest first; None stands for zeros, the start of a sequence.
    valid: True at the real tokens of padded rows; None when all are real. Pads on the left need an empty history.
    resets: True where a packed document starts; nothing is read across its start, neither from x nor from history.

  Returns:
    y in float32, without meaning where valid is false, and the new history in the dtype of history (of x, without
    one): a row's W - 1 inputs up to its last real one, reaching back into the old history when the row has fewer, and
    zero where they belong to an earlier document than the row's last.
  """
  width, length = taps.shape[0], x.shape[1]
  if history is None:
    history = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
  if valid is not None:
    x = jnp.where(_over_channels(valid, x.ndim), x, 0)
  wide = jnp.promote_types(x.dtype, history.dtype)
  inputs = jnp.concatenate([history.astype(wide), x.astype(wide)], axis=1)  # [B, W - 1 + T, *C]
  document = _documents(resets, valid, width)
  y = jnp.zeros(x.shape, jnp.float32)
  for w in range(width):
    tapped = inputs[:, w : w + length].astype(jnp.float32)
    if document is not None:
      own = document[:, w : w + length] == document[:, width - 1 :]
      tapped = jnp.where(_over_channels(own, x.ndim), tapped, 0)
    y = y + tapped * taps[w].astype(jnp.float32)[None, None]
  if document is not None:
    inputs = jnp.where(_over_channels(document == document[:, -1:], x.ndim), inputs, 0)
  return y, _last_inputs(inputs, valid, width - 1).astype(history.dtype)


def _over_channels(per_token: Shaped[Array, "B S"], ndim: int) -> Shaped[Array, "B S ..."]:
  return per_token.reshape(*per_token.shape, *(1,) * (ndim - 2))


def _documents(resets: Bool[Array, "B T"] | None, valid: Bool[Array, "B T"] | None, width: int) -> Array | None:
  """Number of each input's document, history first; 0 is what history belongs to. Pads belong to the last one."""
  if resets is None:
    return None
  starts = resets if valid is None else resets & valid
  return jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (width - 1, 0)))


def _last_inputs(inputs: Float[Array, "B S *C"], valid: Bool[Array, "B T"] | None, count: int) -> Array:
  """The `count` inputs before the end of each row's real tokens. `inputs` starts with `count` old ones."""
  if valid is None:
    return inputs[:, inputs.shape[1] - count :]
  if valid.shape[1] == 1:  # decode: a select, where the gather would be a pass over a copy of the cache
    return jnp.where(_over_channels(valid, inputs.ndim), inputs[:, 1:], inputs[:, :-1])
  used = jnp.max(jnp.where(valid, jnp.arange(1, valid.shape[1] + 1)[None], 0), axis=1)  # up to the last real one
  window = used[:, None] + jnp.arange(count)[None]
  return jnp.take_along_axis(inputs, _over_channels(window, inputs.ndim), axis=1)
