"""One decoder layer: attention and feed-forward on the residual stream, plain or with attention residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.attn_res import AttentionResidual, push_snapshot
from kimi_k3.config import ComputeConfig, KimiK3Config, LayerKind
from kimi_k3.moe.latent_moe import LatentMoE, dense_mlp
from kimi_k3.norms import RMSNorm
from kimi_k3.sharding import NORM, Placement, rows_cut
from kimi_k3.spmd.collectives import Collectives


class Stream(NamedTuple):
  """What runs through the depth: the residual stream, and the AttnRes snapshots [J, B, T, D] (J = 0 without)."""

  prefix: Array
  snapshots: Array


class Context(NamedTuple):
  """What every layer of one call sees.

  Attributes:
    valid: Real tokens of right-padded rows [B, T], in a decoding step the rows that have one; None when all are.
    resets: True where a packed document starts [B, T]; None when none does inside a row.
    upstream: Arguments of the attention of MLA layers: MaxText's, or those of the manual partitioning.
    collectives: In the manual partitioning, between the devices; None where the compiler partitions.
  """

  valid: Bool[Array, "B T"] | None
  resets: Bool[Array, "B T"] | None
  upstream: dict[str, Any]
  collectives: Collectives | None = None

  @property
  def valid_here(self) -> Bool[Array, "B t"] | None:
    """Of the tokens whose residual stream this device holds."""
    if self.valid is None or self.collectives is None:
      return self.valid
    return self.collectives.own_tokens(self.valid)


AttentionFactory = Callable[[LayerKind, nnx.Rngs], nnx.Module]


class Layer(nnx.Module):
  """One layer of the stack.

  x = attention_res(prefix, snapshots)        (AttnRes; else x = prefix)
  every attn_res_block_size layers: snapshot the prefix and start a new one
  prefix += attention(input_norm(x))
  x = mlp_res(prefix, snapshots)              (AttnRes; else x = prefix)
  prefix += mlp(post_attention_norm(x))
  """

  def __init__(
    self,
    config: KimiK3Config,
    compute: ComputeConfig,
    kind: LayerKind,
    moe: bool,
    make_attention: AttentionFactory,
    rngs: nnx.Rngs,
    placement: Placement | None = None,
  ):
    self.config, self.kind, self.placement = config, kind, placement

    def norm():
      return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=compute.weight_dtype, axes=(NORM,))

    self.input_norm, self.post_attention_norm = norm(), norm()
    self.attention = make_attention(kind, rngs)
    self.mlp = LatentMoE(config, compute, rngs, placement) if moe else dense_mlp(config, compute, rngs)
    if config.attn_res_block_size is not None:
      self.attention_res, self.mlp_res = (
        AttentionResidual(config.hidden_size, eps=config.rms_norm_eps, compute=compute, rngs=rngs) for _ in range(2)
      )

  def __call__(
    self, stream: Stream, index: int | Int[Array, ""], context: Context, place: Any = None
  ) -> tuple[Stream, Int[Array, "B T S"] | None]:
    """Returns the stream after the layer and the chosen experts (None for a dense layer).

    Args:
      stream: As it left the layer below.
      index: 0-based number of the layer: a Python int, or traced inside a scan over blocks.
      context: What the whole call shares.
      place: In the manual partitioning, this layer's caches and its index in stacked arrays (spmd.caches.Place).
    """
    prefix, snapshots = stream
    size = self.config.attn_res_block_size
    if size is None:
      prefix = prefix + self._attend(prefix, context, place)
      x = prefix
    else:
      x = self.attention_res(prefix, snapshots, -(-index // size))
      closes = index % size == 0
      snapshots = push_snapshot(snapshots, prefix, index // size, closes)
      attended = self._attend(x, context, place)
      prefix = _select(closes, attended, prefix + attended)
      x = self.mlp_res(prefix, snapshots, index // size + 1)
    h = rows_cut(self.post_attention_norm(x), self.placement)
    out, ids = self._feed_forward(h, context, place)
    return Stream(prefix + rows_cut(out, self.placement), snapshots), ids

  def _attend(self, x: Float[Array, "B T D"], context: Context, place: Any) -> Float[Array, "B T D"]:
    h = self.input_norm(x)
    valid = context.valid_here
    if valid is not None:
      # A weight of 0 would not silence a NaN: what a pad holds must reach neither attention nor a cache.
      h = jnp.where(valid[..., None], h, 0)
    if context.collectives is None:
      h = rows_cut(h, self.placement)
      if self.kind is LayerKind.KDA:
        out = self.attention(h, valid=context.valid, resets=context.resets)
      else:
        out = self.attention(h, valid=context.valid, **context.upstream)
      return rows_cut(out, self.placement)
    h = context.collectives.enter_attention(h)
    if self.kind is LayerKind.KDA:
      out = self.attention(h, valid=context.valid, resets=context.resets, stack=place.cache)
    else:
      out = self.attention(h, valid=context.valid, stack=place.cache, **context.upstream)
    return context.collectives.leave_attention(out)

  def _feed_forward(self, h: Float[Array, "B T D"], context: Context, place: Any):
    collectives = context.collectives
    if isinstance(self.mlp, LatentMoE):
      if collectives is None:
        return self.mlp(h, context.valid)
      return self.mlp.partial(h, context.valid_here, place.index, collectives)
    if collectives is None:
      return self.mlp(h), None
    return collectives.leave_width(self.mlp(collectives.enter_width(h))), None


def _select(condition: bool | Array, yes: Array, no: Array) -> Array:
  if isinstance(condition, bool):
    return yes if condition else no
  return jnp.where(condition, yes, no)
