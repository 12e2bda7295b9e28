"""Gated activations of the MLPs: SiTU (Kimi K3) and SiLU (Kimi-Linear)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_k3.config import KimiK3Config


def situ(
  gate: Float[Array, "*axes"], up: Float[Array, "*axes"], *, beta: float, linear_beta: float | None
) -> Float[Array, "*axes"]:
  """Returns beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta), in float32.

  Args:
    gate: Gate branch, any float dtype.
    up: Linear branch, any float dtype.
    beta: Bound of the gate branch (K3: 4).
    linear_beta: Bound of the linear branch (K3: 25); None leaves it unbounded.

  Source: the released K3 modeling code; the report leaves the linear_beta factor out.
  """
  gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  if linear_beta is not None:
    up = linear_beta * jnp.tanh(up / linear_beta)
  return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up


def gated_activation(
  config: KimiK3Config, gate: Float[Array, "*axes"], up: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
  """Returns the config's gated activation in float32; the caller casts it back to the compute dtype."""
  if config.hidden_act == "situ":
    assert config.situ_beta is not None  # KimiK3Config has seen to it
    return situ(gate, up, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
  if config.hidden_act == "silu":
    return jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
  raise AssertionError(config.hidden_act)  # KimiK3Config admits no other
