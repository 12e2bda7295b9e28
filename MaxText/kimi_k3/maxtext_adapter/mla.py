"""Gated NoPE MLA on MaxText's MLA: its projections, latent cache and prefill attention; our decode attention.

Nothing is rotated: the 64-wide part of a key is a plain tail shared by the heads. Prefill materialises keys and values;
decode folds kv_b into query and output and reads only the 576 cached elements a token, where they lie.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float
from maxtext.common.common_types import (
  DECODING_ACTIVE_SEQUENCE_INDICATOR,
  MODEL_MODE_AUTOREGRESSIVE,
  MODEL_MODE_TRAIN,
  AttentionType,
)
from maxtext.layers import attention_mla
from maxtext.layers.linears import DenseGeneral
from maxtext.utils import max_utils

from kimi_k3.config import MLA_INNER_EPS, ComputeConfig, KimiK3Config
from kimi_k3.linear import Linear
from kimi_k3.maxtext_adapter.latent_cache import LatentCache
from kimi_k3.mla import absorbed_attention
from kimi_k3.sharding import EMBED_ATTN, HEAD_DIM, HEADS


class _Projection(Linear):
  """A Linear in the place of a projection of MaxText's, called as that one is."""

  quant = "fp8-block"  # Not None: MaxText may cut the kernel of a projection without one.

  def __call__(self, x: Float[Array, "..."], out_sharding: Any = None) -> Float[Array, "..."]:
    """Returns the projection in the compute dtype. On MaxText's automatic meshes `out_sharding` is None."""
    del out_sharding
    return super().__call__(x)


def _in_fp8(given: DenseGeneral, compute: ComputeConfig, rngs: nnx.Rngs) -> _Projection:
  """A projection of the same shape, laid out by the same axes."""
  shapes = given.in_features_shape, given.out_features_shape
  return _Projection(*shapes, fp8=True, axes=given.kernel_axes, compute=compute, rngs=rngs)


class KimiMLA(attention_mla.MLA):
  """MLA without rotation, with an optional output gate: out = o_proj(attention * sigmoid(g_proj h))."""

  def __init__(
    self, upstream: Any, config: KimiK3Config, compute: ComputeConfig, mesh: Any, model_mode: str, rngs: nnx.Rngs
  ):
    batch, length = max_utils.get_batch_seq_len_for_mode(upstream, model_mode)
    shape = (batch, length, config.hidden_size)
    super().__init__(
      config=upstream,
      num_query_heads=config.num_heads,
      num_kv_heads=config.num_heads,
      head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
      max_target_length=upstream.max_target_length,
      max_prefill_predict_length=upstream.max_prefill_predict_length,
      mesh=mesh,
      attention_kernel=upstream.attention,
      attention_type=AttentionType.MLA,
      inputs_q_shape=shape,
      inputs_kv_shape=shape,
      dtype=upstream.dtype,
      weight_dtype=upstream.weight_dtype,
      float32_qk_product=upstream.float32_qk_product,
      float32_logits=upstream.float32_logits,
      q_lora_rank=config.q_lora_rank or 0,
      kv_lora_rank=config.kv_lora_rank,
      qk_nope_head_dim=config.qk_nope_head_dim,
      qk_rope_head_dim=config.qk_rope_head_dim,
      v_head_dim=config.v_head_dim,
      max_position_embeddings=config.max_position_embeddings,
      original_max_position_embeddings=config.max_position_embeddings,  # equal: softmax scale without mscale
      model_mode=model_mode,
      rngs=rngs,
    )
    self.kv_norm.epsilon = MLA_INNER_EPS
    if config.q_lora_rank:
      self.q_norm.epsilon = MLA_INNER_EPS
    if config.mla_use_output_gate:
      self.gate = Linear(
        (config.hidden_size,),
        (config.num_heads, config.v_head_dim),
        fp8="dense" in config.fp8_modules,
        axes=(EMBED_ATTN, HEADS, HEAD_DIM),
        compute=compute,
        rngs=rngs,
      )
    self.has_gate = config.mla_use_output_gate
    self.fp8 = "dense" in config.fp8_modules
    if self.fp8:
      for name in (*(("wq_a", "wq_b") if config.q_lora_rank else ("query",)), "wkv_a", "wkv_b", "out"):
        setattr(self, name, _in_fp8(getattr(self, name), compute, rngs))

  def init_mla_kv_caches(self, inputs_kv_shape: tuple[int, ...]) -> LatentCache:
    """The cache of this layer, for as many rows as `inputs_kv_shape` has."""
    sizes: dict[str, Any] = {
      "max_prefill_length": self.max_prefill_predict_length,
      "max_target_length": self.max_target_length,
      "key_seq_len": 1,  # not looked at: the lengths above decide
      "value_seq_len": 1,
      "rngs": self.rngs,
    }
    return LatentCache(
      **sizes,
      batch=inputs_kv_shape[0],
      key_head_size=self.kv_lora_rank,
      value_head_size=self.qk_rope_head_dim,
      dtype=self.dtype,
      prefill_cache_axis_order=self.prefill_cache_axis_order,
      ar_cache_axis_order=self.ar_cache_axis_order,
      model_mode=self.model_mode,
    )

  def _absorbed_weights(self, dtype: Any) -> tuple[Array, Array]:
    """The key and the value half of wkv_b: [C, H, N] and [C, H, V]."""
    if not self.fp8:
      return super()._absorbed_weights(dtype)
    projection: Any = self.wkv_b
    halves = jnp.split(projection.weights().astype(dtype), [self.qk_nope_head_dim], axis=-1)
    to_key, to_value = (self._maybe_shard_with_logical(half, ("kv_lora", "q_heads", None)) for half in halves)
    return cast(Array, to_key), cast(Array, to_value)

  def init_rotary_embedding(self):
    """There is none."""

  def apply_rotary_embedding(self, inputs, inputs_positions=None, rope_kwargs=None):
    """Returns `inputs` as they are: NoPE."""
    del inputs_positions, rope_kwargs
    return inputs

  def __call__(
    self,
    x: Float[Array, "B T D"],
    *,
    valid: Bool[Array, "B T"] | None,
    positions: Array,
    segment_ids: Array | None,
    model_mode: str,
  ) -> Float[Array, "B T D"]:
    """Returns the gated attention output and moves the latent cache on.

    Args:
      x: Normalised hidden state, 0 where `valid` is false.
      valid: Real tokens; in a step, the rows that have one. None: all are.
      positions: Of the tokens; nothing is rotated by them.
      segment_ids: Of the documents in a row, 0 in pads; not looked at in a step.
      model_mode: MaxText's.
    """
    if model_mode == MODEL_MODE_AUTOREGRESSIVE:
      out = self._decode(x, positions, valid)
    else:
      out = self._materialised(x, positions, segment_ids, model_mode)
    if self.has_gate:
      out = out * jax.nn.sigmoid(self.gate(x))
    return cast(Array, self.out_projection(cast(Array, out)))

  def _materialised(self, x, positions, segment_ids, model_mode):
    """Attends with keys and values of every head, through MaxText's attention op, to [B, T, H, V]."""
    if segment_ids is None and model_mode != MODEL_MODE_TRAIN:
      segment_ids = jnp.full(x.shape[:2], DECODING_ACTIVE_SEQUENCE_INDICATOR, jnp.int32)
    query, _ = self.mla_query_projection(x, positions, model_mode)
    key, value, cached = self.mla_kv_projection(x, positions, segment_ids, model_mode, None)
    return self.attention_op(query, key, value, segment_ids, positions, model_mode, cached)

  def _decode(self, x, positions, valid):
    """Attends with one token a row to the cached latents, to [B, 1, H, V]."""
    query, _ = self.mla_query_projection(x, positions, MODEL_MODE_AUTOREGRESSIVE)  # scaled, [B, 1, H, N + R]
    nope, tail = jnp.split(query, [self.qk_nope_head_dim], axis=-1)
    latent, new_tail = jnp.split(self.wkv_a(x), [self.kv_lora_rank], axis=-1)
    cache: Any = self.MlaKVCache_0
    active = jnp.ones(x.shape[:1], bool) if valid is None else valid[:, 0]
    parts = cache.append(self.kv_norm(latent), new_tail, active)
    to_key, to_value = self._absorbed_weights(self.dtype)
    return absorbed_attention(nope, tail, to_key, to_value, parts, precision=self.config.matmul_precision)
