"""Sigmoid routing with a correction bias that takes part in the choice only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.linear import random_matrix
from kimi_k3.norms import over_last
from kimi_k3.sharding import ROUTER_EMBED

_WEIGHT_SUM_EPS = 1e-20


def route(
  scores: Float[Array, "*rows E"], bias: Float[Array, " E"], *, num_selected: int, renormalize: bool, scaling: float
) -> tuple[Int[Array, "*rows S"], Float[Array, "*rows S"]]:
  """Returns the chosen experts, best selection score first, and their combine weights.

  The choice is by scores + bias; the weights are the scores without it, divided by their sum (only when more than one
  expert is chosen) and scaled.

  Args:
    scores: Sigmoid of the router's logits, float32.
    bias: `e_score_correction_bias`, float32.
    num_selected: Experts a token.
    renormalize: Whether the weights are divided by their sum.
    scaling: `routed_scaling_factor`.

  Source: the released K3 modeling code and transformers. Kimi-Linear's published file adds the bias in place and so
  combines with biased scores, which is a bug there.
  """
  _, ids = jax.lax.top_k(scores + over_last(bias, scores.ndim), num_selected)
  weights = jnp.take_along_axis(scores, ids, axis=-1)
  if renormalize and num_selected > 1:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _WEIGHT_SUM_EPS)
  return ids, weights * scaling


class Router(nnx.Module):
  """`kernel` [D, E] and `bias` [E]; all arithmetic in float32 at the highest precision, as choices are discrete."""

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs):
    self.config = config
    shape = (config.hidden_size, config.num_experts)
    weights = random_matrix(rngs, shape, config.hidden_size, compute.weight_dtype)
    self.kernel = nnx.Param(weights, out_sharding=(ROUTER_EMBED, None))
    bias_dtype = jnp.float32 if "e_score_correction_bias" in config.float32_leaves else compute.weight_dtype
    self.bias = nnx.Param(jnp.zeros((config.num_experts,), bias_dtype), out_sharding=(None,))

  def __call__(self, x: Float[Array, "N D"]) -> tuple[Int[Array, "N S"], Float[Array, "N S"]]:
    """Returns expert ids and float32 combine weights of each token, from the full hidden state."""
    kernel = self.kernel[...].astype(jnp.float32)
    logits = jnp.dot(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
    c = self.config
    return route(
      jax.nn.sigmoid(logits),
      self.bias[...].astype(jnp.float32),
      num_selected=c.num_experts_per_token,
      renormalize=c.moe_renormalize,
      scaling=c.routed_scaling_factor,
    )
