"""The KDA layer: projections, short convolutions, decay, recurrence, gated head norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from kimi_k3.cache import KDACache
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.kda.kernel import run_kda
from kimi_k3.kda.short_conv import short_conv
from kimi_k3.linear import Linear, random_matrix
from kimi_k3.norms import gated_head_norm
from kimi_k3.sharding import EMBED_ATTN, HEAD_DIM, HEADS


class KDA(nnx.Module):
  """Kimi Delta Attention.

  h --> q, k, v projections --> short convolution, SiLU --> l2 norm of q, k --+
  h --> f_a, f_b (low rank) --> decay of each key channel --------------------+--> recurrence on S [K, V] --> o
  h --> b --> beta = sigmoid -------------------------------------------------+
  out = o_proj( RMSNorm(o) * sigmoid(z) ), z = g_proj(h) or g_b(g_a(h))

  Source: Kimi Linear, arXiv:2510.26692, and the released K3 modeling code.
  """

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs, *, cache: KDACache | None):
    self.config, self.compute, self.cache = config, compute, cache
    D, H, K, W = config.hidden_size, config.kda_num_heads, config.kda_head_dim, config.kda_conv_width

    def linear(in_shape, out_shape, axes):
      fp8 = "dense" in config.fp8_modules
      return Linear(in_shape, out_shape, fp8=fp8, axes=axes, compute=compute, rngs=rngs)

    conv_dtype = jnp.float32 if "conv1d" in config.float32_leaves else compute.weight_dtype
    for c in "qkv":
      setattr(self, f"{c}_proj", linear((D,), (H, K), (EMBED_ATTN, HEADS, HEAD_DIM)))
      taps = random_matrix(rngs, (W, H, K), W, conv_dtype)
      setattr(self, f"{c}_conv", nnx.Param(taps, out_sharding=(None, HEADS, HEAD_DIM)))
    self.f_a_proj = linear((D,), (K,), (EMBED_ATTN, None))
    self.f_b_proj = linear((K,), (H, K), (None, HEADS, HEAD_DIM))
    rates = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1.0, 16.0)
    self.A_log = nnx.Param(jnp.log(rates), out_sharding=(HEADS,))
    self.dt_bias = nnx.Param(jnp.zeros((H, K), jnp.float32), out_sharding=(HEADS, HEAD_DIM))
    self.b_proj = linear((D,), (H,), (EMBED_ATTN, HEADS))
    if config.kda_full_rank_gate:
      self.g_proj = linear((D,), (H, K), (EMBED_ATTN, HEADS, HEAD_DIM))
    else:
      self.g_a_proj = linear((D,), (K,), (EMBED_ATTN, None))
      self.g_b_proj = linear((K,), (H, K), (None, HEADS, HEAD_DIM))
    self.o_norm = HeadNormScale(K, jnp.float32 if "o_norm" in config.float32_leaves else compute.weight_dtype)
    self.o_proj = linear((H, K), (D,), (HEADS, HEAD_DIM, EMBED_ATTN))

  def __call__(
    self,
    h: Float[Array, "B T D"],
    *,
    valid: Bool[Array, "B T"] | None = None,
    resets: Bool[Array, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """Returns the layer's output and moves the cache on, if there is one.

    Args:
      h: Normalised hidden state.
      valid: Real tokens of right-padded rows; pads touch neither taps nor state. None: all are real.
      resets: True where a packed document starts; None: none starts inside the rows.
    """
    q, k, v = self._convolve(h, valid, resets)
    a = self.f_b_proj(self.f_a_proj(h))
    beta = jax.nn.sigmoid(self.b_proj(h).astype(jnp.float32))
    o = self._recur(q, k, v, a, beta, valid, resets)
    z = self.g_proj(h) if self.config.kda_full_rank_gate else self.g_b_proj(self.g_a_proj(h))
    y = gated_head_norm(o, z, self.o_norm.scale[...], self.config.rms_norm_eps)
    return self.o_proj(y.astype(self.compute.dtype))

  def _convolve(self, h, valid, resets):
    """q, k, v [B, T, H, K] in float32 after convolution and SiLU; moves the histories on."""
    branches, histories = [], []
    for i, c in enumerate("qkv"):
      x = getattr(self, f"{c}_proj")(h)
      history = None if self.cache is None else self.cache.conv_state[:, :, i]
      y, history = short_conv(x, getattr(self, f"{c}_conv")[...], history, valid=valid, resets=resets)
      branches.append(jax.nn.silu(y))
      histories.append(history)
    if self.cache is not None:
      self.cache.conv_state[...] = jnp.stack(histories, axis=2)
    return branches

  def _recur(self, q, k, v, a, beta, valid, resets):
    """The recurrence over the row's tokens: chunked, or one step for one token. Moves the state on."""
    shape = (q.shape[0], *q.shape[2:], v.shape[-1])
    state = jnp.zeros(shape, jnp.float32) if self.cache is None else self.cache.recurrent_state[...]
    o, state = run_kda(
      q,
      k,
      v,
      a,
      self.A_log[...],
      self.dt_bias[...],
      beta,
      state,
      lower_bound=self.config.kda_gate_lower_bound,
      valid=valid,
      resets=resets,
      implementation=self.compute.kda_implementation,
    )
    if self.cache is not None:
      self.cache.recurrent_state[...] = state
    return o


class HeadNormScale(nnx.Module):
  """The weight of the gated head norm: `scale` [V], shared by the heads."""

  def __init__(self, size: int, dtype):
    self.scale = nnx.Param(jnp.ones((size,), dtype), out_sharding=(None,))
