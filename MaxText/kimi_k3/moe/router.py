"""Sigmoid routing with a correction bias that takes part in the choice only.

No loss reaches that bias. It is moved by a rule of its own that evens out how many tokens the experts get
(kimi_k3.training.bias), and what the rule needs to know travels as the bias's gradient: a sum over tokens, which
accumulation, rematerialisation and a cut of the batch treat rightly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.linear import random_matrix
from kimi_k3.norms import over_last
from kimi_k3.sharding import ROUTER_EMBED, Placement

_WEIGHT_SUM_EPS = 1e-20

# Of a token too many, in the bias's gradient. Only its sign is read. The square is 0 in float32 up to 1e7 tokens, so
# that no norm, clip or log of gradients sees it; and 1e-3 of a token is still a normal float32.
BIAS_GRADIENT_SCALE = 1e-30


def route(
  scores: Float[Array, "*rows E"],
  bias: Float[Array, " E"],
  *,
  num_selected: int,
  renormalize: bool,
  scaling: float,
  placement: Placement | None = None,
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
    placement: Of the tokens, [N, E] then, on several devices; None leaves them to the compiler.

  Source: the released K3 modeling code and transformers. Kimi-Linear's published file adds the bias in place and so
  combines with biased scores, which is a bug there.
  """
  ids = _best(scores + over_last(bias, scores.ndim), num_selected, placement)
  weights = jnp.take_along_axis(scores, ids, axis=-1)
  if renormalize and num_selected > 1:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _WEIGHT_SUM_EPS)
  return ids, weights * scaling


def _best(selection: Float[Array, "*rows E"], num_selected: int, placement: Placement | None) -> Array:
  """The numbers of the best. The compiler would gather the scores of all tokens on every device to find them."""

  def best(selection: Array) -> Array:
    return jax.lax.top_k(selection, num_selected)[1]

  if placement is None:
    return best(selection)
  placement.check_divides(tokens=selection.shape[0])
  rows = P(placement.tokens)
  return jax.shard_map(best, mesh=placement.mesh, in_specs=rows, out_specs=rows)(jax.lax.stop_gradient(selection))


@jax.custom_vjp
def with_load_gradient(
  weights: Float[Array, "N S"], bias: Float[Array, " E"], ids: Int[Array, "N S"], valid: Bool[Array, " N"] | None
) -> Float[Array, "N S"]:
  """Returns the combine weights as they are. In a gradient, `bias` gets the experts' loads: see Router."""
  del bias, ids, valid
  return weights


def _forward(weights: Array, bias: Array, ids: Array, valid: Array | None):
  return weights, (ids, valid, bias)  # the bias for its shape alone


def _backward(saved: tuple[Array, Array | None, Array], g: Array):
  ids, valid, bias = saved
  counted = jnp.ones(ids.shape, jnp.int32) if valid is None else jnp.broadcast_to(valid[:, None], ids.shape)
  load = jnp.zeros(bias.shape, jnp.int32).at[ids].add(counted.astype(jnp.int32)).astype(jnp.float32)
  return g, BIAS_GRADIENT_SCALE * (load - jnp.mean(load)), None, None


with_load_gradient.defvjp(_forward, _backward)


class Router(nnx.Module):
  """`kernel` [D, E] and `bias` [E]; all arithmetic in float32 at the highest precision, as choices are discrete."""

  def __init__(self, config: KimiK3Config, compute: ComputeConfig, rngs: nnx.Rngs, placement: Placement | None = None):
    self.config, self.placement = config, placement
    shape = (config.hidden_size, config.num_experts)
    weights = random_matrix(rngs, shape, config.hidden_size, compute.weight_dtype)
    self.kernel = nnx.Param(weights, out_sharding=(ROUTER_EMBED, None))
    bias_dtype = jnp.float32 if "e_score_correction_bias" in config.float32_leaves else compute.weight_dtype
    self.bias = nnx.Param(jnp.zeros((config.num_experts,), bias_dtype), out_sharding=(None,))

  def __call__(
    self, x: Float[Array, "N D"], valid: Bool[Array, " N"] | None = None
  ) -> tuple[Int[Array, "N S"], Float[Array, "N S"]]:
    """Returns expert ids and float32 combine weights of each token, from the full hidden state.

    The gradient of `bias` is BIAS_GRADIENT_SCALE * (tokens that chose the expert - their mean over the experts).

    Args:
      x: Hidden state, any float dtype.
      valid: Real tokens, which count in that gradient; None: all are.
    """
    kernel = self.kernel[...].astype(jnp.float32)
    logits = jnp.dot(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
    c, bias = self.config, self.bias[...].astype(jnp.float32)
    ids, weights = route(
      jax.nn.sigmoid(logits),
      bias,
      num_selected=c.num_experts_per_token,
      renormalize=c.moe_renormalize,
      scaling=c.routed_scaling_factor,
      placement=self.placement,
    )
    return ids, with_load_gradient(weights, bias, ids, valid)
