"""Gated NoPE MLA on one device's heads: the parameters of MaxText's MLA by the same names, attention of our own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.cache import LatentStack
from kimi_k3.config import MLA_INNER_EPS, ComputeConfig, KimiK3Config
from kimi_k3.linear import Linear
from kimi_k3.mla_prefill import latent_prefill, write_chunk
from kimi_k3.mla_step import latent_step
from kimi_k3.norms import RMSNorm
from kimi_k3.sharding import EMBED_ATTN, HEAD_DIM, HEADS


class MLA(nnx.Module):
  """out = o_proj(attention * sigmoid(g_proj h)); a step reads latents only, a chunk of prefill builds keys and values.

  Source: the released K3 modeling code.
  """

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs):
    self.config, self.compute = config, compute
    D, H, C = config.hidden_size, config.num_heads, config.kv_lora_rank
    N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim

    def linear(in_shape, out_shape, axes):
      return Linear(in_shape, out_shape, fp8=False, axes=axes, compute=compute, rngs=rngs)

    def norm(size):
      return RMSNorm(size, eps=MLA_INNER_EPS, dtype=compute.weight_dtype, axes=(None,))

    if config.q_lora_rank:
      self.wq_a = linear((D,), (config.q_lora_rank,), (EMBED_ATTN, None))
      self.q_norm = norm(config.q_lora_rank)
      self.wq_b = linear((config.q_lora_rank,), (H, N + R), (None, HEADS, HEAD_DIM))
    else:
      self.query = linear((D,), (H, N + R), (EMBED_ATTN, HEADS, HEAD_DIM))
    self.wkv_a = linear((D,), (C + R,), (EMBED_ATTN, None))
    self.kv_norm = norm(C)
    self.wkv_b = linear((C,), (H, N + V), (None, HEADS, HEAD_DIM))
    if config.mla_use_output_gate:
      self.gate = linear((D,), (H, V), (EMBED_ATTN, HEADS, HEAD_DIM))
    self.out = linear((H, V), (D,), (HEADS, HEAD_DIM, EMBED_ATTN))

  def __call__(
    self,
    x: Float[Array, "B T D"],
    *,
    valid: Bool[Array, "B T"] | None,
    stack: LatentStack,
    positions: Int[Array, " B"],
    lengths: Int[Array, " B"] | None,
    axes: tuple[str, ...],
    cut: str,
    history: bool,
  ) -> Float[Array, "B T D"]:
    """Returns this device's part of the layer's output, a sum over the heads of all, and moves the latents on.

    Args:
      x: Normalised hidden state, 0 where `valid` is false.
      valid: Not looked at: `positions` and `lengths` say it.
      stack: The latents.
      positions: In a step of each row's token, negative without one. In prefill the tokens that a row has already.
      lengths: Real tokens of each row of a chunk; None in a step.
      axes: Mesh axes that cut the heads and the cache.
      cut: How they cut the cache in a step: "sequence" or "batch". Prefill's are cut by sequence.
      history: Whether a row of the chunk may have tokens already.
    """
    del valid
    c = self.config
    q = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.query(x)
    q = q * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    latent, tail = jnp.split(self.wkv_a(x), [c.kv_lora_rank], axis=-1)
    new = jnp.concatenate([self.kv_norm(latent), tail], axis=-1)
    to_key, to_value = jnp.split(self.wkv_b.weights(), [c.qk_nope_head_dim], axis=-1)
    if lengths is None:
      out = self._step(q[:, 0], new[:, 0], to_key, to_value, stack, positions, axes, cut)[:, None]
    else:
      out = latent_prefill(
        q,
        new,
        to_key,
        to_value,
        stack.latents,
        stack.layer,
        positions,
        lengths,
        axes=axes,
        precision=self.compute.precision,
        implementation=self.compute.mla_prefill_implementation,
        history=history,
        interpret=self.compute.interpret_kernels,
      )
      stack.latents = write_chunk(stack.latents, new, stack.layer, positions, lengths, axes=axes)
    if c.mla_use_output_gate:
      out = out * jax.nn.sigmoid(self.gate(x))
    return self.out(out)

  def _step(self, q, new, to_key, to_value, stack, positions, axes, cut):
    """One token a row: kv_b is folded into query and output."""
    c, precision = self.config, self.compute.precision
    nope, tail = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
    absorbed = jnp.einsum("bhn,chn->bhc", nope, to_key, precision=precision)
    o, stack.latents = latent_step(
      jnp.concatenate([absorbed, tail], axis=-1),
      new,
      stack.latents,
      stack.layer,
      positions,
      cut=cut,
      axes=axes,
      num_values=c.kv_lora_rank,
      precision=precision,
      implementation=self.compute.mla_step_implementation,
      interpret=self.compute.interpret_kernels,
    )
    return jnp.einsum("bhc,chv->bhv", o, to_value, precision=precision)
