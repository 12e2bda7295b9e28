"""The choice of an implementation of chunked KDA, by name: never a fallback.

tokamax tries its implementations in order when none is named, and the last is a loop over tokens, 20 to 30 times
slower; here exactly one is asked for, and what it cannot do is refused. This file alone knows tokamax's layout,
[H, B, T, *].
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kimi_k3.errors import InputError
from kimi_k3.kda.chunked import WIPE, kda_chunked
from kimi_k3.kda.gate import decay_gate
from kimi_k3.kda.reference import kda_step, l2_normalize
from kimi_k3.kda.step_kernel import require_tpu
from kimi_k3.kda.tops_backend import tops_chunk_kda, tops_kda

KERNELS = ("tokamax_mosaic", "tops")  # the compiler cannot partition these: see sharded.py
_TOKAMAX_CHUNK = 64  # tokens; tokamax takes whole chunks only
_TOKAMAX_BOUND = -5.0  # a step: below, the exponents that tokamax factors leave float32
_CLOSED = -1000.0  # sigmoid's argument where a gate must be exactly 0


class _Call(NamedTuple):
  """The arguments of `run_kda`, with pads (valid false) zeroed and resets in pads dropped."""

  q: Float[Array, "B T H K"]
  k: Float[Array, "B T H K"]
  v: Float[Array, "B T H V"]
  a: Float[Array, "B T H K"]
  a_log: Float[Array, " H"]
  dt_bias: Float[Array, "H K"]
  beta: Float[Array, "B T H"]
  state: Float[Array, "B H K V"]
  lower_bound: float | None
  valid: Bool[Array, "B T"] | None
  resets: Bool[Array, "B T"] | None


def run_kda(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T H V"],
  a: Float[Array, "B T H K"],
  a_log: Float[Array, " H"],
  dt_bias: Float[Array, "H K"],
  beta: Float[Array, "B T H"],
  state: Float[Array, "B H K V"],
  *,
  lower_bound: float | None,
  valid: Bool[Array, "B T"] | None,
  resets: Bool[Array, "B T"] | None,
  implementation: str,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
  """Returns each token's output and the state after a row's last real token, both float32.

  A single token (T = 1) is one `kda_step`, whatever implementation is named: that names the chunked one.

  Args:
    q: Queries, neither normalised nor scaled.
    k: Keys, not normalised.
    v: Values. tokamax rounds its intermediates to the dtype of q, k and v; the portable form computes in float32.
    a: Low-rank projection that the decay gate takes.
    a_log: Log rate of the decay, one a head, padding removed.
    dt_bias: Bias of the decay gate.
    beta: Learning rate of the delta rule, in [0, 1].
    state: What the tokens before left behind; zeros at the start of a sequence.
    lower_bound: Of the decay gate, None for the softplus form.
    valid: True at the real tokens of padded rows; None when all are real. Nothing in a pad is read, its output is 0,
      and a row without a real token keeps every bit of its state.
    resets: True where a packed document starts: it sees an empty state.
    implementation: "portable" (any length, backend and gate), "tokamax_xla_chunked" (lower_bound of at least -5),
      "tokamax_mosaic" (the same, on TPU), or "tops" (on TPU, where that package is installed: see tops_backend.py).

  Raises:
    InputError: if the implementation is unknown or cannot compute this.
  """
  if implementation not in _CHUNKED:
    known = ", ".join(sorted(_CHUNKED))
    raise InputError(f"kda_implementation is {implementation!r}, expected one of: {known}")
  _check_supported(implementation, lower_bound, resets)
  if valid is not None:
    # NaN times 0 is NaN: a pad's content is replaced, not multiplied away.
    q, k, v, a, beta = (jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0) for x in (q, k, v, a, beta))
    resets = None if resets is None else resets & valid
  call = _Call(q, k, v, a, a_log, dt_bias, beta, state, lower_bound, valid, resets)
  o, after = _step(call) if q.shape[1] == 1 else _CHUNKED[implementation](call)
  if valid is None:
    return o, after
  # Adding 0 to a state would change -0.0 and subnormals, and reading a broken one gives NaN at the pads.
  has_token_B = jnp.any(valid, axis=1)
  after = jnp.where(has_token_B[:, None, None, None], after, state.astype(jnp.float32))
  return jnp.where(valid[..., None, None], o, 0.0), after


def _check_supported(implementation: str, lower_bound: float | None, resets: Array | None) -> None:
  if implementation == "portable":
    return
  advice = 'use kda_implementation "portable"'
  if implementation == "tops":
    tops_kda()
  if resets is not None:
    raise InputError(f"{implementation} does not take packed documents (resets): {advice}")
  if lower_bound is None:
    # mosaic has a form for it, which gives NaN where a channel decays by e^-15 or more a step, as trained gates do.
    raise InputError(f"{implementation} needs a gate_lower_bound, and there is none (the softplus gate): {advice}")
  if lower_bound < _TOKAMAX_BOUND:
    raise InputError(
      f"{implementation} takes a gate_lower_bound of at least {_TOKAMAX_BOUND}, found {lower_bound}: {advice}"
    )
  if implementation in KERNELS:
    require_tpu(implementation, advice)


def _decay(call: _Call) -> Float[Array, "B T H K"]:
  g = decay_gate(call.a, call.a_log, call.dt_bias, lower_bound=call.lower_bound)
  return g if call.valid is None else jnp.where(call.valid[..., None, None], g, 0.0)


def _portable(call: _Call):
  q, k = l2_normalize(call.q), l2_normalize(call.k)
  return kda_chunked(q, k, call.v, _decay(call), call.beta, call.state, resets=call.resets)


def _tops(call: _Call):
  q, k = (l2_normalize(x) for x in (call.q, call.k))
  return tops_chunk_kda(q, k, call.v, _decay(call), call.beta, call.state)


def _step(call: _Call):
  g = _decay(call)
  if call.resets is not None:
    g = jnp.where(call.resets[..., None, None], WIPE, g)
  q, k, v, g, beta = (x[:, 0] for x in (l2_normalize(call.q), l2_normalize(call.k), call.v, g, call.beta))
  o_BHV, state = kda_step(q, k, v, g, beta, call.state)
  return o_BHV[:, None], state


def _xla_chunked(call: _Call):
  return _tokamax(call, "xla_chunked", **_fused_gate(call))


def _mosaic(call: _Call):
  return _tokamax(call, "mosaic", **_fused_gate(call))


def _fused_gate(call: _Call) -> dict:
  """Arguments for the gate inside tokamax, whose raw input is set so that pads, ours and the caller's, decay by 0."""
  # No gradient: the pads' own is 0 anyway, once finite.
  closed_HK = jax.lax.stop_gradient(_CLOSED * jnp.exp(-call.a_log)[:, None] - call.dt_bias)[None, None]
  a = call.a.astype(jnp.float32)
  if call.valid is not None:
    a = jnp.where(call.valid[..., None, None], a, closed_HK)
  tail = jnp.broadcast_to(closed_HK, (a.shape[0], -a.shape[1] % _TOKAMAX_CHUNK, *a.shape[2:]))
  return dict(
    gate=_head_first(jnp.concatenate([a, tail], axis=1)),
    a_log=call.a_log.astype(jnp.float32),
    delta_time_bias=call.dt_bias.astype(jnp.float32).reshape(-1),
    lower_bound=call.lower_bound,
    use_gate_in_kernel=True,
  )


def _tokamax(call: _Call, implementation: Literal["xla_chunked", "mosaic"], **gate):
  from tokamax import ops  # slow to import, and needed for these implementations alone

  o_HBTV, state = ops.kimi_delta_attention(
    *(_head_first(x) for x in (call.q, call.k, call.v)),
    beta=_number_a_token(call.beta.astype(jnp.float32)),
    **gate,
    initial_state=call.state.astype(jnp.float32)[:, None],
    output_final_state=True,
    use_qk_l2norm=True,
    implementation=implementation,
  )
  assert state is not None  # asked for
  o = jnp.moveaxis(o_HBTV, 0, 2)[:, : call.q.shape[1]]
  return o.astype(jnp.float32), state[:, 0]


def _head_first(x: Float[Array, "B T H *C"]) -> Float[Array, "H B S *C"]:
  """[H, B, T, *] in whole chunks; the tail is 0."""
  tail = ((0, 0), (0, -x.shape[1] % _TOKAMAX_CHUNK), *((0, 0),) * (x.ndim - 2))
  return jnp.moveaxis(jnp.pad(x, tail), 2, 0)


def _number_a_token(x: Float[Array, "B T H"]) -> Float[Array, "H B S"]:
  """The same of one number a token and head.

  tokamax reads it chunk by chunk, a token a sublane. Cut into chunks before the tokens move to the lanes, that is one
  transposition; cut after, the TPU compiler unrolls it over the tokens: 1 MiB of code for 8192 tokens of 3 heads, and
  compile times that grow with the length.
  """
  rows, length, heads = x.shape
  chunks = -(-length // _TOKAMAX_CHUNK)
  x = jnp.pad(x, ((0, 0), (0, chunks * _TOKAMAX_CHUNK - length), (0, 0)))
  return x.reshape(rows, chunks, _TOKAMAX_CHUNK, heads).transpose(3, 0, 1, 2).reshape(heads, rows, -1)


_CHUNKED: dict[str, Callable[[_Call], tuple[Array, Array]]] = {
  "portable": _portable,
  "tokamax_xla_chunked": _xla_chunked,
  "tokamax_mosaic": _mosaic,
  "tops": _tops,
}
