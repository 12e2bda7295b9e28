"""The decode loop: rows wait for slots, slots decode together, a finished row makes room for the next."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.lengths import bucket
from kimi_k3.generate.sampling import Sampler

GATHERED_BYTES = 256 * 1024 * 1024  # 256 MiB


@runtime_checkable
class SlotEngine(Protocol):
  """What the loop needs of an engine."""

  @property
  def num_slots(self) -> int:
    """Rows that decode at the same time."""
    ...

  def prefill(self, tokens: np.ndarray, true_length: int) -> Any:
    """Runs a padded prompt; its `logits` [X] are those of the next token."""
    ...

  def insert(self, prompt: Any, *slots: int) -> None:
    """Puts what `prefill` returned into empty slots."""
    ...

  def step(self, tokens: np.ndarray) -> Any:
    """Feeds one token a slot; logits [B, X] of the next ones. Empty slots are left alone."""
    ...

  def release(self, slot: int) -> None:
    """Empties a slot."""
    ...


@dataclasses.dataclass
class Row:
  """One prompt and what has come of it. `finish_reason` is None while it is not done."""

  index: int
  prompt_ids: list[int]
  ids: list[int] = dataclasses.field(default_factory=list)
  finish_reason: str | None = None
  error: str | None = None


@dataclasses.dataclass
class Timing:
  """Seconds, with compiling apart.

  Attributes:
    first_token: Of each row, from the start of its prefill to its first token.
    steps: Of each decoding step.
    step_tokens: Tokens that the steps gave to rows.
    compiling: Tracing, lowering and compiling, in none of the above.
  """

  first_token: list[float] = dataclasses.field(default_factory=list)
  steps: list[float] = dataclasses.field(default_factory=list)
  step_tokens: int = 0
  compiling: float = 0.0

  def summary(self) -> str:
    """Returns one line: time to first token, decoding speed, compile time."""
    first = (
      f"time to first token {np.median(self.first_token) * 1e3:.1f} ms (median)" if self.first_token else "no token"
    )
    if self.steps:
      speed = f"{self.step_tokens / sum(self.steps):.1f} tok/s ({np.median(self.steps) * 1e3:.1f} ms a step, median)"
    else:
      speed = "0.0 tok/s (no decoding step)"
    return f"{first}, {speed}, compile {self.compiling:.1f} s apart"


@dataclasses.dataclass(frozen=True)
class Request:
  """What to generate.

  Attributes:
    max_new_tokens: At most, for each row.
    stop_id: The token that ends a row; None: none does.
    sampler: How tokens are chosen.
    max_prompt: Longest padded prompt the engine takes.
    ends: Whether a row ends with these ids, asked after each new token; None: only by stop_id or length.
  """

  max_new_tokens: int
  stop_id: int | None
  sampler: Sampler
  max_prompt: int
  ends: Callable[[list[int]], bool] | None = None


def generate(
  engine: SlotEngine,
  prompts: Sequence[Sequence[int]],
  request: Request,
  *,
  clock: CompileClock,
  on_finished: Callable[[Row], object] = lambda _: None,
) -> tuple[list[Row], Timing]:
  """Returns every prompt's row, in input order, and how long it took.

  Args:
    engine: Holds the model and the slots' caches.
    prompts: Token ids, of any lengths and number.
    request: What to generate.
    clock: Tells compiling from running.
    on_finished: Called with each row as it ends.
  """
  rows = [Row(i, list(prompt)) for i, prompt in enumerate(prompts)]
  waiting, timing = deque(rows), Timing()
  slots: list[Row | None] = [None] * engine.num_slots

  def timed(work: Callable[..., None], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    end = time.perf_counter()
    compiling = clock.compiling(start, end)
    timing.compiling += compiling
    return end - start - compiling

  while waiting or any(slots):
    for slot in range(len(slots)):
      while slots[slot] is None and waiting:
        row = waiting.popleft()
        timing.first_token.append(timed(_prefill, engine, slot, row, request))
        slots[slot] = _unless_finished(row, on_finished)  # a row of one token never had a slot
    active = [row for row in slots if row is not None]
    if active:
      timing.steps.append(timed(_step, engine, slots, request))
      timing.step_tokens += len(active)
      for slot, row in enumerate(slots):
        if row is not None and row.finish_reason is not None:
          engine.release(slot)
          slots[slot] = _unless_finished(row, on_finished)
  return rows, timing


def to_host(array: jax.Array) -> np.ndarray:
  """Returns all of an array, which may be spread over several processes: then each must call, and each gets it.

  What travels at a time is some rows, up to GATHERED_BYTES: every device holds them whole for a moment.
  """
  if array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  assert isinstance(array.sharding, NamedSharding), array.sharding
  everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
  step = max(1, GATHERED_BYTES * array.shape[0] // array.nbytes)
  take = jax.jit(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, min(step, x.shape[0])), out_shardings=everywhere)
  # The last part starts early enough to be whole.
  starts = [min(i, max(0, array.shape[0] - step)) for i in range(0, array.shape[0], step)]
  result = np.empty(array.shape, array.dtype)
  for start in starts:
    part = np.asarray(take(array, start))
    result[start : start + part.shape[0]] = part
  return result


def _prefill(engine: SlotEngine, slot: int, row: Row, request: Request) -> None:
  n = len(row.prompt_ids)
  tokens = np.zeros(bucket(n, request.max_prompt), np.int32)
  tokens[:n] = row.prompt_ids
  prompt = engine.prefill(tokens, n)
  sampled = request.sampler(prompt.logits[None], np.array([row.index]), np.array([0]))
  token, finite = (np.asarray(x) for x in sampled)
  _append(row, int(token[0]), bool(finite[0]), request)
  if row.finish_reason is None:
    engine.insert(prompt, slot)


def _step(engine: SlotEngine, slots: Sequence[Row | None], request: Request) -> None:
  logits = engine.step(np.array([0 if row is None else row.ids[-1] for row in slots]))
  numbers = np.array([0 if row is None else row.index for row in slots])
  steps = np.array([0 if row is None else len(row.ids) for row in slots])
  tokens, finite = (np.asarray(x) for x in request.sampler(logits, numbers, steps))
  for slot, row in enumerate(slots):
    if row is not None:
      _append(row, int(tokens[slot]), bool(finite[slot]), request)


def _append(row: Row, token: int, finite: bool, request: Request) -> None:
  if not finite:
    row.finish_reason, row.error = "error", f"logits of new token {len(row.ids)} are not finite"
    return
  row.ids.append(token)
  if token == request.stop_id or (request.ends is not None and request.ends(row.ids)):
    row.finish_reason = "stop"
  elif len(row.ids) >= request.max_new_tokens:
    row.finish_reason = "length"


def _unless_finished(row: Row, on_finished: Callable[[Row], object]) -> Row | None:
  if row.finish_reason is None:
    return row
  on_finished(row)
  return None
