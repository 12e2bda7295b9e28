"""The KDA layer: projections, short convolutions, decay, recurrence, gated head norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from kimi_k3.cache import KDACache, KDAStack
from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.kda.gate import decay_gate
from kimi_k3.kda.kernel import KERNELS, run_kda
from kimi_k3.kda.sharded import KdaPlacement, run_kda_sharded
from kimi_k3.kda.short_conv import short_conv
from kimi_k3.kda.short_conv_step import short_conv_step_stacked
from kimi_k3.kda.step_kernel import kda_step_stacked
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

  def __init__(
    self,
    config: KimiK3Config,
    compute: ComputeConfig,
    rngs: nnx.Rngs,
    *,
    cache: KDACache | None,
    placement: KdaPlacement | None = None,
  ):
    self.config, self.compute, self.cache, self.placement = config, compute, cache, placement
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
    stack: KDAStack | None = None,
  ) -> Float[Array, "B T D"]:
    """Returns the layer's output and moves the cache on, if there is one.

    Args:
      h: Normalised hidden state.
      valid: Real tokens of right-padded rows; pads touch neither taps nor state. None: all are real.
      resets: True where a packed document starts; None: none starts inside the rows.
      stack: The caches in the manual partitioning, in place of the layer's own.
    """
    step = stack is not None and h.shape[1] == 1
    q, k, v = self._convolve_step(h, valid, stack) if step else self._convolve(h, valid, resets, stack)
    a = self.f_b_proj(self.f_a_proj(h))
    beta = jax.nn.sigmoid(self.b_proj(h).astype(jnp.float32))
    if step:
      o = self._step(q, k, v, a, beta, valid, stack)
    else:
      o = self._recur(q, k, v, a, beta, valid, resets, stack)
    z = self.g_proj(h) if self.config.kda_full_rank_gate else self.g_b_proj(self.g_a_proj(h))
    y = gated_head_norm(o, z, self.o_norm.scale[...], self.config.rms_norm_eps)
    return self.o_proj(y.astype(self.compute.dtype))

  def _convolve(self, h, valid, resets, stack):
    """q, k, v [B, T, H, K] in float32 after convolution and SiLU; moves the histories on."""
    before = None
    if stack is not None:
      before = stack.conv_state
    elif self.cache is not None:
      before = self.cache.conv_state[...]
    branches, histories = [], []
    for i, c in enumerate("qkv"):
      x = getattr(self, f"{c}_proj")(h)
      history = None if before is None else before[:, :, i]
      y, history = short_conv(x, getattr(self, f"{c}_conv")[...], history, valid=valid, resets=resets)
      branches.append(jax.nn.silu(y))
      histories.append(history)
    if stack is not None:
      stack.conv_state = jnp.stack(histories, axis=2)
    elif self.cache is not None:
      self.cache.conv_state[...] = jnp.stack(histories, axis=2)
    return branches

  def _convolve_step(self, h, valid, stack):
    """The same of one token."""
    x = jnp.stack([getattr(self, f"{c}_proj")(h)[:, 0] for c in "qkv"], axis=1)
    taps = jnp.stack([getattr(self, f"{c}_conv")[...] for c in "qkv"])
    active = None if valid is None else valid[:, 0]
    y, stack.conv_states = short_conv_step_stacked(x, taps, stack.conv_states, stack.layer, active)
    return [y[:, i][:, None] for i in range(3)]

  def _step(self, q, k, v, a, beta, valid, stack):
    """One step of the recurrence, on the stacked state where it lies."""
    lower_bound = self.config.kda_gate_lower_bound
    g = decay_gate(a, self.A_log[...], self.dt_bias[...], lower_bound=lower_bound)[:, 0]
    o, stack.recurrent_states = kda_step_stacked(
      q[:, 0],
      k[:, 0],
      v[:, 0],
      g,
      beta[:, 0],
      stack.recurrent_states,
      stack.layer,
      active=None if valid is None else valid[:, 0],
      implementation=self.compute.kda_step_implementation,
      interpret=self.compute.interpret_kernels,
    )
    return o[:, None]

  def _recur(self, q, k, v, a, beta, valid, resets, stack):
    """The recurrence over the row's tokens: chunked, or one step for one token. Moves the state on."""
    if stack is not None:
      state = stack.recurrent_state
    elif self.cache is not None:
      state = self.cache.recurrent_state[...]
    else:
      state = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]), jnp.float32)
    if self.compute.kda_implementation != "portable":
      # Others compute in the dtype of what they are given: that of the released model's convolutions.
      q, k, v = (x.astype(self.compute.dtype) for x in (q, k, v))
    arrays = (q, k, v, a, self.A_log[...], self.dt_bias[...], beta, state)
    how = {
      "lower_bound": self.config.kda_gate_lower_bound,
      "valid": valid,
      "resets": resets,
      "implementation": self.compute.kda_implementation,
    }
    if self.placement is not None and self.compute.kda_implementation in KERNELS:
      o, state = run_kda_sharded(*arrays, self.placement, **how)
    else:  # what is plain JAX the compiler cuts by itself
      o, state = run_kda(*arrays, **how)
    if stack is not None:
      stack.recurrent_state = state
    elif self.cache is not None:
      self.cache.recurrent_state[...] = state
    return o


class HeadNormScale(nnx.Module):
  """The weight of the gated head norm: `scale` [V], shared by the heads."""

  def __init__(self, size: int, dtype):
    self.scale = nnx.Param(jnp.ones((size,), dtype), out_sharding=(None,))
