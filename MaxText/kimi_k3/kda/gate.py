"""The decay gate of Kimi Delta Attention: how fast each key channel of the state forgets."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kimi_k3.errors import InputError


def decay_gate(
  a: Float[Array, "B T H K"],
  a_log: Float[Array, " H"],
  dt_bias: Float[Array, "H K"],
  *,
  lower_bound: float | None,
) -> Float[Array, "B T H K"]:
  """Returns the log decay of each key channel, which is never positive.

  With a bound: lower_bound * sigmoid(exp(a_log) * (a + dt_bias)). Without: -exp(a_log) * softplus(a + dt_bias).

  Args:
    a: Low-rank projection of the hidden state, any float dtype.
    a_log: Log rate, one scalar a head, padding already removed.
    dt_bias: Bias a head and key channel.
    lower_bound: Most negative log decay a step (K3: -5.0); None selects the Kimi-Linear form, which has none.

  Returns:
    Natural log, float32 whatever the dtypes of the arguments; inside (lower_bound, 0) when there is a bound.

  Raises:
    InputError: if lower_bound is not negative.

  Source: Kimi Linear, arXiv:2510.26692; the bounded form is the released K3 modeling code.
  """
  if lower_bound is not None and not lower_bound < 0:
    raise InputError(f"gate_lower_bound is {lower_bound}, expected a negative log decay a step, or None for no bound")
  # float32 before any arithmetic: a log decay is summed over thousands of steps and then exponentiated.
  rate_11H1 = jnp.exp(a_log.astype(jnp.float32))[None, None, :, None]
  biased_BTHK = a.astype(jnp.float32) + dt_bias.astype(jnp.float32)[None, None]
  if lower_bound is None:
    return -rate_11H1 * jax.nn.softplus(biased_BTHK)
  return lower_bound * jax.nn.sigmoid(rate_11H1 * biased_BTHK)
