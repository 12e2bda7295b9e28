"""The routed experts of many tokens: rows sorted by expert, then a grouped matrix product. Nothing is dropped.

Rows of one device are walked in chunks, so that temporaries do not grow with the number of choices.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_k3.config import ComputeConfig, KimiK3Config
from kimi_k3.moe.packed import ExpertStack
from kimi_k3.moe.tokamax_gmm import grouped_product

CHUNK_ROWS = 8192  # (token, choice) pairs at a time; each is a row of the latent and a row of the expert's width
_ROW_TILE = 16


# tokamax_gmm.grouped_product, or a stand-in with its arguments where there is no TPU.
GroupedProduct = Callable[..., Array]


def grouped_experts(
  x: Float[Array, "N L"],
  ids: Int[Array, "N S"],
  weights: Float[Array, "N S"],
  stack: ExpertStack,
  layer: Int[Array, ""],
  *,
  config: KimiK3Config,
  compute: ComputeConfig,
  product: GroupedProduct = grouped_product,
  chunk_rows: int = CHUNK_ROWS,
) -> Float[Array, "N L"]:
  """Returns the weighted sum over each token's experts in the stack, float32.

  Args:
    x: Input of the experts; rows without an expert here may hold anything.
    ids: Experts of each token, E for one that is not here.
    weights: Combine weights, float32.
    stack: In the form float4.
    layer: Which layer of the stack.
    config: Activation.
    compute: Compute dtype; tokamax's kernel takes bfloat16.
    product: The grouped matrix product.
    chunk_rows: Rows at a time, a multiple of 16.

  Raises:
    InputError: what tokamax_gmm.grouped_product refuses.
  """
  num_experts, num_choices, dtype = stack.num_experts, ids.shape[1], jnp.dtype(compute.dtype)
  flat, flat_weights = ids.reshape(-1), weights.reshape(-1)
  chunk_rows = min(chunk_rows, -(-flat.shape[0] // _ROW_TILE) * _ROW_TILE)
  order = jnp.pad(jnp.argsort(flat, stable=True).astype(jnp.int32), (0, chunk_rows))
  end_E = jnp.cumsum(jnp.zeros((num_experts,), jnp.int32).at[flat].add(1))
  total = end_E[-1]

  def chunk(carry):
    start, out = carry
    slots = jax.lax.dynamic_slice_in_dim(order, start, chunk_rows)
    token = slots // num_choices
    sizes_E = jnp.diff(jnp.clip(end_E - start, 0, chunk_rows), prepend=jnp.zeros((1,), jnp.int32))
    gate_up = ((stack.w1, stack.s1), (stack.w3, stack.s3))
    hidden = product(x[token].astype(dtype), gate_up, sizes_E, layer, activation=activation_name(config))
    y = product(hidden, ((stack.w2, stack.s2),), sizes_E, layer, activation=None)
    # Rows past the last group are not written and may hold anything.
    real = (jnp.arange(chunk_rows, dtype=jnp.int32) + start < total)[:, None]
    return start + chunk_rows, out.at[token].add(jnp.where(real, y * flat_weights[slots][:, None], 0.0))

  start = (jnp.int32(0), jnp.zeros(x.shape, jnp.float32))
  return jax.lax.while_loop(lambda carry: carry[0] < total, chunk, start)[1]


def activation_name(config: KimiK3Config) -> str:
  """Returns the name by which tokamax knows the config's gated activation."""
  if config.hidden_act == "situ":
    linear = "none" if config.situ_linear_beta is None else config.situ_linear_beta
    return f"situ:{config.situ_beta}:{linear}"
  if config.hidden_act == "silu":
    return "silu"
  raise AssertionError(config.hidden_act)  # KimiK3Config admits no other
