"""The definition of Kimi Delta Attention, token by token, and the single step that decoding uses.

For each head, with a state S of [K, V] in float32:

  S <- exp(g_t)[:, None] * S;   r = v_t - S^T k_t;   S <- S + beta_t * k_t r^T;   o_t = K^-0.5 * S^T q_t

Source: Kimi Linear, arXiv:2510.26692.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# The backend's default may round float32 operands to bfloat16; the state carries such an error on for ever.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def l2_normalize(x: Float[Array, "*N K"], eps: float = 1e-6) -> Float[Array, "*N K"]:
  """Returns x / sqrt(sum of x^2 over the last axis + eps), in float32.

  The eps is added under the root once, not once a channel as an RMS norm would have it. Queries and keys need this:
  without it nothing raises, but the delta rule diverges.
  """
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def kda_recurrence(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  g: Float[Array, "B T H K"],
  beta: Float[Array, "B T H"],
  state: Float[Array, "B H K V"],
  *,
  resets: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
  """Returns each token's output and the state after the last one, both float32, by a scan over the tokens.

  Args:
    q: Normalised queries, not scaled.
    k: Normalised keys.
    v: Values.
    g: Log decay, natural log, never positive.
    beta: Learning rate of the delta rule, in [0, 1].
    state: What the tokens before left behind; zeros at the start of a sequence.
    resets: True where a packed document starts: it sees an empty state.
  """
  scale = q.shape[-1] ** -0.5

  def step(state_BHKV, token):
    q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, reset_B = token
    state_BHKV = jnp.where(reset_B[:, None, None, None], 0.0, state_BHKV * jnp.exp(g_BHK)[..., None])
    r_BHV = v_BHV - _einsum("bhk,bhkv->bhv", k_BHK, state_BHKV)
    state_BHKV = state_BHKV + (beta_BH[..., None] * k_BHK)[..., None] * r_BHV[..., None, :]
    return state_BHKV, scale * _einsum("bhk,bhkv->bhv", q_BHK, state_BHKV)

  if resets is None:
    resets = jnp.zeros(q.shape[:2], bool)
  tokens = [x.astype(jnp.float32).swapaxes(0, 1) for x in (q, k, v, g, beta)]
  state, o_TBHV = jax.lax.scan(step, state.astype(jnp.float32), (*tokens, resets.swapaxes(0, 1)))
  return o_TBHV.swapaxes(0, 1), state


def kda_step(
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B H V"],
  g: Float[Array, "B H K"],
  beta: Float[Array, "B H"],
  state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
  """Returns one token's output and the new state, both float32: `kda_recurrence` for a single token.

  The state is what a decode step moves, so it is read once for both products. With d = exp(g):
  r = v - S^T (d k), and S_new^T q = S^T (d q) + beta (q . k) r, which needs no second look at S_new.

  Args: as of `kda_recurrence`, without the token axis.
  """
  q, k, v, g, beta, state = (x.astype(jnp.float32) for x in (q, k, v, g, beta, state))
  decay_BHK = jnp.exp(g)
  read_BH2V = _einsum("bhck,bhkv->bhcv", jnp.stack([k, q], axis=2) * decay_BHK[:, :, None], state)
  r_BHV = v - read_BH2V[:, :, 0]
  written_BHV = (jnp.sum(q * k, axis=-1) * beta)[..., None] * r_BHV
  state = state * decay_BHK[..., None] + (beta[..., None] * k)[..., None] * r_BHV[..., None, :]
  return q.shape[-1] ** -0.5 * (read_BH2V[:, :, 1] + written_BHV), state
