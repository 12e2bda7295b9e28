"""Attention residuals: each token mixes the snapshots of its own residual stream taken at earlier depths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kimi_k3.config import ComputeConfig
from kimi_k3.linear import random_matrix
from kimi_k3.norms import over_last, rms_scale
from kimi_k3.sharding import NORM


def attention_residual(
  prefix: Float[Array, "B T D"],
  snapshots: Float[Array, "J B T D"],
  count: int | Array,
  query: Float[Array, " D"],
  eps: float,
) -> Float[Array, "B T D"]:
  """Returns the softmax-weighted sum of the first `count` snapshots and the prefix.

  Keys are the normalised candidates, values the candidates as they are. The candidates are never joined into one array:
  that copy is what made this step dominate long prefills.

  Args:
    prefix: The running residual stream, always the last candidate.
    snapshots: A fixed buffer; slots from `count` on are not looked at.
    count: How many slots hold a snapshot: a Python int (then only those are read) or a traced scalar (then masked).
    query: norm.weight * proj.weight, float32.
    eps: Of the normalisation (1e-5).

  Source: the released K3 modeling code.
  """
  filled = jnp.arange(snapshots.shape[0])[:, None, None] < count
  if isinstance(count, int):
    snapshots = snapshots[:count]
  else:  # a weight of 0 would not silence a NaN
    snapshots = jnp.where(filled[..., None], snapshots, 0)
  if not snapshots.shape[0]:
    return prefix
  scores_JBT = jnp.sum(rms_scale(snapshots, eps) * over_last(query, snapshots.ndim), axis=-1)
  if not isinstance(count, int):
    scores_JBT = jnp.where(filled, scores_JBT, -jnp.inf)
  score_BT = jnp.sum(rms_scale(prefix, eps) * over_last(query, prefix.ndim), axis=-1)
  largest_BT = jnp.maximum(jnp.max(scores_JBT, axis=0), score_BT)
  weights_JBT, weight_BT = jnp.exp(scores_JBT - largest_BT[None]), jnp.exp(score_BT - largest_BT)
  mixed = jnp.sum(weights_JBT[..., None] * snapshots.astype(jnp.float32), axis=0)
  mixed += weight_BT[..., None] * prefix.astype(jnp.float32)
  total_BT = jnp.sum(weights_JBT, axis=0) + weight_BT
  return (mixed / total_BT[..., None]).astype(prefix.dtype)


class AttentionResidual(nnx.Module):
  """The two weights of one mixing site, kept apart as stored: `norm` [D] and `proj` [D]."""

  def __init__(self, size: int, *, eps: float, compute: ComputeConfig, rngs: nnx.Rngs):
    self.eps = eps
    self.norm = nnx.Param(jnp.ones((size,), compute.weight_dtype), out_sharding=(NORM,))
    self.proj = nnx.Param(random_matrix(rngs, (size,), size, compute.weight_dtype), out_sharding=(NORM,))

  def __call__(
    self, prefix: Float[Array, "B T D"], snapshots: Float[Array, "J B T D"], count: int | Array
  ) -> Float[Array, "B T D"]:
    """Returns the mix of the first `count` snapshots and the prefix."""
    query = self.norm[...].astype(jnp.float32) * self.proj[...].astype(jnp.float32)
    return attention_residual(prefix, snapshots, count, query, self.eps)


def push_snapshot(
  snapshots: Float[Array, "J B T D"], prefix: Float[Array, "B T D"], slot: int | Array, take: bool | Array
) -> Float[Array, "J B T D"]:
  """Returns the buffer with `prefix` in `slot` if `take`. Touches one slot, so that a scan can update it in place."""
  if isinstance(take, bool):
    return snapshots.at[slot].set(prefix) if take else snapshots
  slot = jnp.minimum(slot, snapshots.shape[0] - 1)
  kept = jax.lax.dynamic_index_in_dim(snapshots, slot, keepdims=False)
  return jax.lax.dynamic_update_index_in_dim(snapshots, jnp.where(take, prefix, kept), slot, 0)
