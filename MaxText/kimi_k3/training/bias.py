"""The rule that balances the routed experts: it moves the selection bias, which no loss reaches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def selection_bias_update(rate: float) -> optax.GradientTransformation:
  """Returns the rule b_i += rate * (sign(e_i) - mean_j sign(e_j)), where e_i is the mean load less that of expert i.

  What stands for the gradient of a bias is -e_i in a unit of its own (kimi_k3.moe.router), of which the sign is read.
  The last axis is that of the experts; a stack of layers has others before it. Updates are float32.

  Args:
    rate: Of a step, in units of a score (0 to 1). Moonlight: 1e-3, and 0 in the last stage of its training.

  Source: Moonlight, arXiv:2502.16982, appendix C: DeepSeek's rule (arXiv:2408.15664) less the mean, which bounds the
  biases and changes no choice.
  """

  def start(params: Any) -> optax.EmptyState:
    del params
    return optax.EmptyState()

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params

    def one(gradient: jax.Array) -> jax.Array:
      sign = -jnp.sign(gradient.astype(jnp.float32))
      return rate * (sign - jnp.mean(sign, axis=-1, keepdims=True))

    return jax.tree.map(one, updates), state

  return optax.GradientTransformation(start, update)
