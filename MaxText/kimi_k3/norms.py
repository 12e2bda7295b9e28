"""RMSNorm, and the gated norm over each KDA head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def rms_scale(x: Float[Array, "*axes N"], eps: float) -> Float[Array, "*axes N"]:
  """Returns x divided by its root mean square over the last axis, in float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def over_last(weights: Float[Array, " N"], ndim: int) -> Float[Array, "*ones N"]:
  """Returns weights of the last axis with axes of size 1 before it, so that nothing is promoted by rank in silence."""
  return weights.reshape((1,) * (ndim - 1) + weights.shape)


def gated_head_norm(
  o: Float[Array, "*axes V"], z: Float[Array, "*axes V"], scale: Float[Array, " V"], eps: float
) -> Float[Array, "*axes V"]:
  """Returns RMSNorm(o) * scale * sigmoid(z) over the channels of each head, all in float32.

  Args:
    o: Output of the recurrence, one head's channels last.
    z: Projection of the hidden state, before the sigmoid.
    scale: One weight a channel, shared by the heads.
    eps: Added to the mean square (1e-5).
  """
  return over_last(scale.astype(jnp.float32), o.ndim) * rms_scale(o, eps) * jax.nn.sigmoid(z.astype(jnp.float32))


class RMSNorm(nnx.Module):
  """scale * (x / rms(x)): normalised in float32, rounded to x's dtype, then scaled.

  The order of rounding and scaling is the released code's; it shows in bfloat16.
  """

  def __init__(self, size: int, *, eps: float, dtype, axes: tuple[str | None]):
    self.eps = eps
    self.scale = nnx.Param(jnp.ones((size,), dtype), out_sharding=axes)

  def __call__(self, x: Float[Array, "*axes N"]) -> Float[Array, "*axes N"]:
    """Returns x normalised over its last axis, in x's dtype."""
    return over_last(self.scale[...].astype(x.dtype), x.ndim) * rms_scale(x, self.eps).astype(x.dtype)
