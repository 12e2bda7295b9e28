"""Kimi Delta Attention over chunks of tokens: matrix products inside a chunk, one state update a chunk.

Within a chunk whose incoming state is S0, with G_i the sum of the log decays up to and including token i,

  (I + diag(beta) tril(A_kk, -1)) U = diag(beta) (V - (K e^G) S0)       what each token writes, [C, V]
  O  = K^-0.5 ((Q e^G) S0 + tril(A_qk) U)
  S' = e^G_C S0 + (K e^(G_C - G))^T U,       A_xk[i, j] = sum over channels of x_i k_j e^(G_i - G_j)

e^(G_i - G_j) is at most 1, but its factors e^G_i and e^-G_j under- and overflow float32: K3's gate alone reaches -5 a
token. So a chunk is cut into sub-chunks. Between two of them the exponent is split at the start of the later one, which
leaves two sums of log decays, neither positive; inside one, each pair of tokens has its own exponent. No exponent
anywhere is a difference of two running sums, so a long decayed past takes no digits from the present either.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

# A log decay that leaves exactly nothing, yet is finite: it is summed up, and infinities times zero are NaN.
WIPE = -1e30


def kda_chunked(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  g: Float[Array, "B T H K"],
  beta: Float[Array, "B T H"],
  state: Float[Array, "B H K V"],
  *,
  resets: Bool[Array, "B T"] | None = None,
  chunk: int = 64,
  sub_chunk: int = 16,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
  """Returns what `kda_recurrence` returns, in ceil(T / chunk) steps, for any T and any log decay g <= 0.

  Args:
    q: Normalised queries, not scaled.
    k: Normalised keys.
    v: Values.
    g: Log decay, natural log, never positive; a token with g = 0 and beta = 0 leaves the state alone.
    beta: Learning rate of the delta rule, in [0, 1].
    state: What the tokens before left behind; zeros at the start of a sequence.
    resets: True where a packed document starts: it sees an empty state.
    chunk: Most tokens a step. Fewer are taken where that leaves less padding.
    sub_chunk: Tokens with an exponent a pair; memory and work inside a chunk grow with it.

  Returns:
    Output and final state, float32 whatever the dtypes of the arguments.

  Raises:
    ValueError: if chunk is not a multiple of sub_chunk.
  """
  if chunk % sub_chunk:
    raise ValueError(f"chunk is {chunk}, expected a multiple of sub_chunk = {sub_chunk}")
  if resets is not None:
    g = jnp.where(resets[..., None, None], WIPE, g.astype(jnp.float32))
  batch, length, heads, _ = q.shape
  steps = math.ceil(length / chunk)
  size = math.ceil(length / (steps * sub_chunk)) * sub_chunk  # T = 65 takes 2 steps of 48, not of 64

  def to_chunks(x):
    x = jnp.pad(x, ((0, 0), (0, steps * size - length), *((0, 0),) * (x.ndim - 2)))
    return x.reshape(batch, steps, size, *x.shape[2:]).swapaxes(0, 1)

  # Rematerialised, so that a gradient keeps one state a chunk and not every exponent of every pair.
  step = jax.checkpoint(functools.partial(_chunk_step, sub_chunk=sub_chunk), prevent_cse=False)
  inputs = tuple(to_chunks(x) for x in (q, k, v, g, beta))
  state, o_NBCHV = jax.lax.scan(step, state.astype(jnp.float32), inputs)
  return o_NBCHV.swapaxes(0, 1).reshape(batch, steps * size, heads, -1)[:, :length], state


def _chunk_step(state_BHKV, inputs, *, sub_chunk: int):
  """One step of the scan: inputs are q, k, v, g [B, C, H, *] and beta [B, C, H] of a chunk."""
  # [B, H, N, c, *]: N sub-chunks of c tokens.
  q, k, v, g, beta = (_split(x.astype(jnp.float32).swapaxes(1, 2), sub_chunk) for x in inputs)
  decay = _Decays.of(g)
  qk = jnp.stack([q, k])
  (within_q, within_k), (across_q, across_k) = _within_subs(qk, k, decay), _across_subs(qk, k, decay)
  read_q, read_k = _einsum("zbhnck,bhkv->zbhncv", qk * jnp.exp(decay.from_chunk_start)[None], state_BHKV)

  beta = beta[..., None]
  u = _solve(beta * within_k, beta[..., None] * across_k, beta * (v - read_k))
  o = read_q + _einsum("bhncd,bhndv->bhncv", within_q, u) + _einsum("bhncmd,bhmdv->bhncv", across_q, u)
  written = _einsum("bhnck,bhncv->bhkv", k * jnp.exp(decay.to_chunk_end), u)
  state_BHKV = jnp.exp(decay.whole_chunk)[..., None] * state_BHKV + written
  return state_BHKV, q.shape[-1] ** -0.5 * o.reshape(*o.shape[:2], -1, o.shape[-1]).swapaxes(1, 2)


def _split(x: Float[Array, "B H C ..."], sub_chunk: int) -> Float[Array, "B H N c ..."]:
  return x.reshape(*x.shape[:2], -1, sub_chunk, *x.shape[3:])


class _Decays(NamedTuple):
  """Log decays over the spans that a chunk needs, each a plain sum of the tokens' own: never positive.

  A span excludes the token it starts from and includes the one it ends at.
  """

  from_sub_start: Float[Array, "B H N c K"]  # before the sub-chunk's first token -> token
  from_chunk_start: Float[Array, "B H N c K"]  # before the chunk's first token -> token
  to_chunk_end: Float[Array, "B H N c K"]  # token -> the chunk's last
  to_later_sub: Float[Array, "B H N N c K"]  # [n, m]: token of sub-chunk m -> before the first of n; wiped unless m < n
  pairs: Float[Array, "B H N c c K"]  # [i, j] in a sub-chunk: token j -> token i; wiped unless j <= i
  whole_chunk: Float[Array, "B H K"]

  @classmethod
  def of(cls, g: Float[Array, "B H N c K"]) -> "_Decays":
    subs, size = g.shape[2:4]
    upto, after = _lower(size), _lower(size, -1).T  # row i: tokens up to and including i; tokens after i
    earlier, later = _lower(subs, -1), _lower(subs, -1).T
    from_start, to_end = _einsum("ij,bhnjk->bhnik", upto, g), _einsum("ij,bhnjk->bhnik", after, g)
    total = from_start[..., -1, :]  # of each sub-chunk
    pairs = _einsum("ijl,bhnlk->bhnijk", upto[:, None] * after[None], g)
    between = _einsum("nml,bhlk->bhnmk", earlier[:, None] * later[None], total)
    between = jnp.where(earlier[None, None, :, :, None] > 0, between, WIPE)
    return cls(
      from_sub_start=from_start,
      from_chunk_start=from_start + _einsum("nm,bhmk->bhnk", earlier, total)[..., None, :],
      to_chunk_end=to_end + _einsum("nm,bhmk->bhnk", later, total)[..., None, :],
      to_later_sub=to_end[:, :, None] + between[..., None, :],
      pairs=jnp.where(upto[None, None, None, :, :, None] > 0, pairs, WIPE),
      whole_chunk=total.sum(axis=2),
    )


def _lower(size: int, diagonal: int = 0) -> np.ndarray:
  return np.tril(np.ones((size, size), np.float32), diagonal)


def _within_subs(qk: Float[Array, "2 B H N c K"], k: Float[Array, "B H N c K"], decay: _Decays):
  """A_qk and A_kk, stacked, of two tokens of one sub-chunk, [2, B, H, N, c, c]: 0 unless j <= i."""
  k_NccK = k[:, :, :, None] * jnp.exp(decay.pairs)
  return _einsum("zbhnik,bhnijk->zbhnij", qk, k_NccK)


def _across_subs(qk: Float[Array, "2 B H N c K"], k: Float[Array, "B H N c K"], decay: _Decays):
  """A_qk and A_kk, stacked, of a token [n, c] and one of an earlier sub-chunk [m, d], [2, B, H, N, c, N, c]."""
  k_NNcK = k[:, :, None] * jnp.exp(decay.to_later_sub)
  return _einsum("zbhnck,bhnmdk->zbhncmd", qk * jnp.exp(decay.from_sub_start)[None], k_NNcK)


def _solve(
  within: Float[Array, "B H N c c"], across: Float[Array, "B H N c N c"], rhs: Float[Array, "B H N c V"]
) -> Float[Array, "B H N c V"]:
  """Solves (I + tril(A, -1)) u = rhs by forward substitution over the sub-chunks that A is given in."""
  inverse = _inverse_unit_lower(within)
  u = []
  for n in range(rhs.shape[2]):
    rest = rhs[:, :, n]
    if n:
      rest = rest - _einsum("bhcmd,bhmdv->bhcv", across[:, :, n, :, :n], jnp.stack(u, axis=2))
    u.append(_einsum("bhcd,bhdv->bhcv", inverse[:, :, n], rest))
  return jnp.stack(u, axis=2)


def _inverse_unit_lower(a: Float[Array, "B H N c c"]) -> Float[Array, "B H N c c"]:
  """Returns the inverse of I + tril(a, -1), by merging inverted diagonal blocks of 1, 2, 4, ... rows.

  [[P, 0], [R, Q]] has the inverse [[P', 0], [-Q' R P', Q']]. Unlike the series I - a + a^2 - ..., whose terms reach
  thousands in 16 rows of like keys, every number here is an entry of a true inverse, and the delta rule keeps those
  within 1.
  """
  index = np.arange(a.shape[-1])
  inverse = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype)[None, None, None], a.shape)
  size = 1
  while size < a.shape[-1]:
    block, pair = index // size, index // (2 * size)
    joins = (pair[:, None] == pair[None]) & (block[:, None] > block[None])
    below = _einsum("bhnij,bhnjk->bhnik", inverse, jnp.where(joins[None, None, None], a, 0.0))
    inverse = inverse - _einsum("bhnij,bhnjk->bhnik", below, inverse)
    size *= 2
  return inverse
