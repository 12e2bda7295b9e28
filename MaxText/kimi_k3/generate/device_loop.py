"""Many decoding steps in one program: the host sees rows only when some have finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.generate.sampling import Draws, sample

NUM_STOP_IDS = 4  # that a program has room for; more would be compiled again
RUNNING, STOP, LENGTH, NOT_FINITE = range(4)  # status of a row; the status of an empty slot means nothing

Sampling = Callable[[Float[Array, "B X"], Draws, Int[Array, " B"]], tuple[Int[Array, " B"], Bool[Array, " B"]]]


class Rows(NamedTuple):
  """The rows of all slots, arrays [B]; what an empty slot has means nothing.

  Attributes:
    tokens: The last token of each row, which the next step feeds.
    counts: New tokens of each row.
    limits: New tokens it may have at most, more than `counts`.
    draws: How it chooses.
  """

  tokens: Any
  counts: Any
  limits: Any
  draws: Draws


class Plan(NamedTuple):
  """When the program ends; none of it is compiled in.

  Attributes:
    stop_ids: Tokens that end a row [NUM_STOP_IDS]; -1 is none.
    max_steps: Steps at most.
    until_finished: Ends when so many rows have finished.
  """

  stop_ids: Any
  max_steps: Any
  until_finished: Any


class Decoded(NamedTuple):
  """What a call gave, on the host.

  Attributes:
      tokens: New tokens [B, N] of each slot, the stop token included; the first `counts` of a slot's mean something.
      counts: How many each slot got [B].
      status: NUM_STOP_IDS = 4  # that a program has room for; more would be compiled again
  RUNNING, STOP, LENGTH or NOT_FINITE [B]; a row that is NOT_FINITE would have had one token more.
      steps: Steps taken.
  """

  tokens: np.ndarray
  counts: np.ndarray
  status: np.ndarray
  steps: int


def decode_loop(
  step: Callable[[Any, Array, Array], tuple[Float[Array, "B X"], Any]],
  state: Any,
  rows: Rows,
  active: Bool[Array, " B"],
  plan: Plan,
  *,
  buffer: int,
  choose: Sampling = sample,
  total: Callable[[Array], Array] = lambda x: x,
) -> tuple[Any, Int[Array, "B columns"]]:
  """Returns the state after the last step, and what `decoded` reads. Use under jit, with the state donated.

  Args:
    step: (state, tokens [B], active [B]) -> (logits [B, X], state); rows that are not active stay as they are.
    state: Of the model.
    rows: Of all slots.
    active: Which slots hold a row.
    plan: When to end.
    buffer: N, steps that there is room for: the one number that is compiled in.
    choose: Of the next tokens: `sample`, or the same on a device's part of the logits.
    total: The sum of a number over the devices that cut the rows.
  """
  num_rows = rows.tokens.shape[0]

  def going_on(carry):
    return carry["go"]

  def body(carry):
    before, steps = carry["active"], carry["steps"]
    logits, inner = step(carry["state"], carry["tokens"], before)
    tokens, finite = choose(logits, rows.draws, carry["counts"])
    counts = carry["counts"] + (before & finite)
    stopped = (tokens[:, None] == plan.stop_ids[None]).any(axis=-1)
    status = jnp.where(stopped, STOP, jnp.where(counts >= rows.limits, LENGTH, RUNNING))
    status = jnp.where(before, jnp.where(finite, status, NOT_FINITE), carry["status"]).astype(jnp.int32)
    after = before & (status == RUNNING)
    given = jnp.where(before & finite, tokens, -1)
    left = total(jnp.sum(after, dtype=jnp.int32))
    return {
      "state": inner,
      "tokens": jnp.where(after, tokens, carry["tokens"]),
      "counts": counts,
      "status": status,
      "active": after,
      "given": jax.lax.dynamic_update_slice_in_dim(carry["given"], given[:, None], steps, 1),
      "steps": steps + 1,
      "go": (steps + 1 < limit) & (left > 0) & (first - left < plan.until_finished),
    }

  first = total(jnp.sum(active, dtype=jnp.int32))
  limit = jnp.minimum(plan.max_steps, buffer)
  carry = {
    "state": state,
    "tokens": rows.tokens.astype(jnp.int32),
    "counts": rows.counts.astype(jnp.int32),
    "status": jnp.zeros(num_rows, jnp.int32),
    "active": active,
    "given": jnp.full((num_rows, buffer), -1, jnp.int32),
    "steps": jnp.int32(0),
    "go": (limit > 0) & (first > 0),
  }
  carry = jax.lax.while_loop(going_on, body, carry)
  counts, steps = carry["counts"] - rows.counts, jnp.full(num_rows, carry["steps"])
  return carry["state"], jnp.concatenate(
    [carry["given"], jnp.stack([counts, carry["status"], steps], axis=1).astype(jnp.int32)], axis=1
  )


def decoded(packed: np.ndarray) -> Decoded:
  """Returns what `decode_loop` packed into one array, so that one transfer brings it to the host."""
  return Decoded(packed[:, :-3], packed[:, -3], packed[:, -2], int(packed[0, -1]))
