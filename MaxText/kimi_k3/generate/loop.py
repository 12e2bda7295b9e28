"""Continuous batching: rows wait for slots, slots decode together on the device, a finished row makes room at once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kimi_k3.errors import InputError
from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.device_loop import NOT_FINITE, NUM_STOP_IDS, RUNNING, Decoded, Plan, Rows
from kimi_k3.generate.lengths import bucket
from kimi_k3.generate.sampling import Draws, SamplingOptions, check_seed, sample_everywhere

GATHERED_BYTES = 256 * 1024 * 1024  # 256 MiB
STEPS_PER_CALL = 128  # of a program: at 20 ms a step, the host hears of a row that goes on every 2.5 s
CANCELLED = "cancelled"


@runtime_checkable
class SlotEngine(Protocol):
  """What generation needs of an engine."""

  @property
  def num_slots(self) -> int:
    """Rows that decode at the same time."""
    ...

  @property
  def max_prompt(self) -> int:
    """Tokens of a prompt, at most."""
    ...

  @property
  def max_steps(self) -> int:
    """Steps that a row can take after any prompt."""
    ...

  def rows_together(self, tokens: int) -> int:
    """Prompts of one padded length that `prefill_together` takes, at most."""
    ...

  def prefill_together(self, prompts: Sequence[np.ndarray], true_lengths: Sequence[int]) -> Sequence[Any]:
    """Runs prompts of one padded length; the `logits` [X] of each are those of its next token."""
    ...

  def insert(self, prompt: Any, *slots: int) -> None:
    """Puts one of what `prefill_together` returned into empty slots."""
    ...

  def decode(self, rows: Rows, plan: Plan, *, buffer: int) -> Decoded:
    """Decodes the rows in slots until the plan says to end, `buffer` steps at most."""
    ...

  def release(self, slot: int) -> None:
    """Empties a slot."""
    ...


@dataclasses.dataclass(frozen=True)
class Request:
  """A row to generate.

  Attributes:
    index: Its number, unique in a run.
    prompt_ids: One token or more.
    max_new_tokens: At most, 1 or more.
    sampling: How its tokens are chosen.
  """

  index: int
  prompt_ids: list[int]
  max_new_tokens: int
  sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)


@dataclasses.dataclass
class Row:
  """A prompt and what has come of it. Times are those of time.perf_counter(), compiling included.

  Attributes:
    index: Of its request.
    prompt_ids: Of its request.
    ids: New tokens, the one that ended it included.
    finish_reason: "stop", "length" or "error"; None while it is not done.
    error: What went wrong.
    started_s: When its prefill began.
    first_token_s: When its first token was there.
    ended_s: When it had ended.
  """

  index: int
  prompt_ids: list[int]
  ids: list[int] = dataclasses.field(default_factory=list)
  finish_reason: str | None = None
  error: str | None = None
  started_s: float | None = dataclasses.field(default=None, compare=False)
  first_token_s: float | None = dataclasses.field(default=None, compare=False)
  ended_s: float | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of the decoding program: its seconds without compiling, its steps, and the tokens that rows got."""

  seconds: float
  steps: int
  tokens: int


@dataclasses.dataclass
class Timing:
  """Seconds, with compiling apart.

  Attributes:
    first_token: Of each row, from the start of its prefill to its first token.
    calls: Of the decoding program.
    compiling: Tracing, lowering and compiling, in none of the above.
  """

  first_token: list[float] = dataclasses.field(default_factory=list)
  calls: list[Call] = dataclasses.field(default_factory=list)
  compiling: float = 0.0

  def summary(self) -> str:
    """Returns one line: time to first token, decoding speed, compile time."""
    first = (
      f"time to first token {np.median(self.first_token) * 1e3:.1f} ms (median)" if self.first_token else "no token"
    )
    if self.calls:
      step = np.repeat([call.seconds / call.steps for call in self.calls], [call.steps for call in self.calls])
      total = sum(call.seconds for call in self.calls)
      tokens = sum(call.tokens for call in self.calls)
      speed = f"{tokens / total:.1f} tok/s ({np.median(step) * 1e3:.1f} ms a step, median)"
    else:
      speed = "0.0 tok/s (no decoding step)"
    return f"{first}, {speed}, compile {self.compiling:.1f} s apart"


@dataclasses.dataclass
class _Slot:
  row: Row
  request: Request


def _ignore(_: Any) -> None:
  pass


class Generator:
  """Runs requests through the slots of an engine.

  What a row gets depends on its request, its number and the run's seed alone: not on its slot, on when it came or on
  what decodes beside it.
  """

  def __init__(
    self,
    engine: SlotEngine,
    *,
    stop_ids: Collection[int],
    clock: CompileClock,
    seed: int = 0,
    ends: Callable[[list[int]], bool] | None = None,
    steps_per_call: int = STEPS_PER_CALL,
  ):
    """Prepares nothing on the device: programs are compiled when they are first called.

    Args:
      engine: Holds the model and the slots' caches. All its slots are empty, and will be again after each run.
      stop_ids: Tokens that end a row.
      clock: Tells compiling from running.
      seed: Of rows that bring none.
      ends: Whether a row ends with these new ids: asked on the host for each new token, so the device may have run on
        to the end of its call; what comes after is dropped.
      steps_per_call: Steps of the program, at most: how long rows are out of the host's sight.
    """
    check_seed("the seed", seed)
    if len(set(stop_ids)) > NUM_STOP_IDS:
      raise InputError(f"{len(set(stop_ids))} stop tokens, expected {NUM_STOP_IDS} at most")
    if steps_per_call < 1:
      raise InputError(f"steps a call: {steps_per_call}, expected 1 or more")
    self._engine, self._clock, self._seed = engine, clock, seed
    self._stop_ids, self._ends, self._steps_per_call = frozenset(stop_ids), ends, steps_per_call
    self._device_stop_ids = np.full(NUM_STOP_IDS, -1, np.int32)
    self._device_stop_ids[: len(self._stop_ids)] = sorted(self._stop_ids)
    self._lock = threading.Lock()
    self._cancelled: set[int] = set()
    self._stopped = False

  def run(
    self,
    requests: Iterable[Request],
    on_finished: Callable[[Row], object] = _ignore,
    on_progress: Callable[[int], object] = _ignore,
  ) -> Timing:
    """Runs all requests and returns how long it took.

    Args:
      requests: Taken one by one as slots become free.
      on_finished: Called with each row as it ends, in any order. A row that cannot be run, or whose logits are not
        finite, ends as "error".
      on_progress: Called with the number of new tokens after each prompt and each call of the decoding program.
    """
    self._stopped = False
    waiting, timing = _Peekable(requests), Timing()
    slots: list[_Slot | None] = [None] * self._engine.num_slots
    try:
      while not self._stopped:
        self._fill(slots, waiting, timing, on_finished, on_progress)
        if not any(slots) or self._stopped:
          break
        self._decode(slots, waiting, timing, on_progress)
        self._clear(slots, on_finished)
    finally:
      for number, slot in enumerate(slots):
        if slot is not None:
          self._engine.release(number)
      with self._lock:
        self._cancelled.clear()
    return timing

  def cancel(self, index: int) -> None:
    """Ends a row, soon: as "error", "cancelled", with the tokens it has. One that waits never starts.

    A number that has ended, or that never comes, is forgotten when the run is over.
    """
    with self._lock:
      self._cancelled.add(index)

  def stop(self) -> None:
    """Makes `run` return, soon: rows in slots are dropped without a word, and no more requests are taken."""
    self._stopped = True

  def _fill(self, slots, waiting, timing, on_finished, on_progress) -> None:
    """Gives each empty slot the next row that needs one: a row that ends with its first token does not."""
    while waiting and not self._stopped and (free := [n for n, slot in enumerate(slots) if slot is None]):
      group = self._next_group(waiting, len(free), on_finished)
      if not group:
        continue
      seconds = self._timed(timing, lambda g=group, f=free: self._prefill(g, f))
      now = time.perf_counter()
      for slot in group:
        slot.row.first_token_s = now
        timing.first_token.append(seconds)
      # All that have a slot are noted before anybody is told, who may raise: what is noted is released.
      for slot in group:
        if slot.row.finish_reason is None:
          slots[free.pop(0)] = slot
      on_progress(sum(len(slot.row.ids) for slot in group))
      for slot in group:
        if slot.row.finish_reason is not None:
          _announce(slot.row, on_finished)

  def _next_group(self, waiting: _Peekable, room: int, on_finished: Callable[[Row], object]) -> list[_Slot]:
    """Takes the next rows of one padded length, as many as are run together and have a slot to go to."""
    group: list[_Slot] = []
    size = 0
    while waiting and len(group) < room and not self._stopped:
      request = waiting.peek()
      padded = bucket(len(request.prompt_ids), self._engine.max_prompt)
      if group and (padded != size or len(group) == self._engine.rows_together(size)):
        break
      waiting.take()
      row = Row(request.index, list(request.prompt_ids), started_s=time.perf_counter())
      row.error = CANCELLED if self._is_cancelled(row) else self._refusal(request)
      if row.error is not None:
        row.finish_reason = "error"
        _announce(row, on_finished)
      else:
        group.append(_Slot(row, request))
        size = padded
    return group

  def _refusal(self, request: Request) -> str | None:
    """Why a row cannot be run."""
    length, new, engine = len(request.prompt_ids), request.max_new_tokens, self._engine
    if not length:
      return "the prompt is empty: expected one token or more"
    if new < 1:
      return f"max_new_tokens is {new}, expected 1 or more"
    if length > engine.max_prompt:
      return (
        f"the prompt has {length} tokens, longer than the prompt cache: max_prefill_predict_length is "
        f"{engine.max_prompt}; raise it"
      )
    if new - 1 > engine.max_steps:  # the last token is not fed
      return (
        f"{new} new tokens do not fit: the cache holds {engine.max_steps} (max_target_length - "
        "max_prefill_predict_length); ask for fewer or raise the first"
      )
    return None

  def _prefill(self, group: Sequence[_Slot], free: Sequence[int]) -> None:
    prompts, lengths = [], [len(slot.row.prompt_ids) for slot in group]
    for slot, length in zip(group, lengths, strict=True):
      tokens = np.zeros(bucket(length, self._engine.max_prompt), np.int32)
      tokens[:length] = slot.row.prompt_ids
      prompts.append(tokens)
    places = iter(free)
    for slot, prompt in zip(group, self._engine.prefill_together(prompts, lengths), strict=True):
      draws = Draws.of([slot.request.sampling], [slot.row.index], self._seed)
      token, finite = sample_everywhere(prompt.logits[None], draws, np.array([0]))
      self._append(slot.row, slot.request, int(token[0]), finite=bool(finite[0]))
      if slot.row.finish_reason is None:
        self._engine.insert(prompt, next(places))

  def _decode(self, slots: Sequence[_Slot | None], waiting: _Peekable, timing: Timing, on_progress) -> None:
    rows = self._rows(slots)
    # A free slot is worth something only while a row waits for it.
    until = 1 if waiting else len(slots)
    plan = Plan(self._device_stop_ids, np.int32(self._steps_per_call), np.int32(until))
    found: Any = None

    def call():
      nonlocal found
      found = self._engine.decode(rows, plan, buffer=self._steps_per_call)

    seconds = self._timed(timing, call)
    given = 0
    for number, slot in enumerate(slots):
      if slot is not None:
        before = len(slot.row.ids)
        self._take(slot, found, number)
        given += len(slot.row.ids) - before
    timing.calls.append(Call(seconds, found.steps, given))
    on_progress(given)

  def _rows(self, slots: Sequence[_Slot | None]) -> Rows:
    empty = SamplingOptions()
    return Rows(
      np.array([0 if s is None else s.row.ids[-1] for s in slots], np.int32),
      np.array([0 if s is None else len(s.row.ids) for s in slots], np.int32),
      np.array([1 if s is None else s.request.max_new_tokens for s in slots], np.int32),
      Draws.of(
        [empty if s is None else s.request.sampling for s in slots],
        [0 if s is None else s.row.index for s in slots],
        self._seed,
      ),
    )

  def _take(self, slot: _Slot, found: Decoded, number: int) -> None:
    """Gives a row its tokens, one after the other: a host's end may come before the device's."""
    row, status = slot.row, int(found.status[number])
    for token in found.tokens[number, : found.counts[number]].tolist():
      self._append(row, slot.request, token, finite=True)
      if row.finish_reason is not None:
        return
    if status == NOT_FINITE:
      self._append(row, slot.request, -1, finite=False)
    assert (row.finish_reason is None) == (status == RUNNING), (row.finish_reason, status)

  def _append(self, row: Row, request: Request, token: int, *, finite: bool) -> None:
    if not finite:
      row.finish_reason, row.error = "error", f"logits of new token {len(row.ids)} are not finite"
      return
    row.ids.append(token)
    if token in self._stop_ids or (self._ends is not None and self._ends(row.ids)):
      row.finish_reason = "stop"
    elif len(row.ids) >= request.max_new_tokens:
      row.finish_reason = "length"

  def _clear(self, slots: list[_Slot | None], on_finished: Callable[[Row], object]) -> None:
    """Empties the slots of rows that have ended or are cancelled."""
    for number, slot in enumerate(slots):
      if slot is None:
        continue
      row = slot.row
      if row.finish_reason is None and self._is_cancelled(row):
        row.finish_reason, row.error = "error", CANCELLED
      if row.finish_reason is not None:
        self._engine.release(number)
        slots[number] = None
        _announce(row, on_finished)

  def _is_cancelled(self, row: Row) -> bool:
    with self._lock:
      return row.index in self._cancelled

  def _timed(self, timing: Timing, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    end = time.perf_counter()
    compiling = self._clock.compiling(start, end)
    timing.compiling += compiling
    return end - start - compiling


def generate(
  engine: SlotEngine,
  requests: Sequence[Request],
  *,
  on_finished: Callable[[Row], object] = _ignore,
  **options: Any,
) -> tuple[list[Row], Timing]:
  """Returns the row of each request, in their order, and how long it took. Options are those of Generator."""
  rows: dict[int, Row] = {}

  def keep(row: Row) -> None:
    rows[row.index] = row
    on_finished(row)

  timing = Generator(engine, **options).run(requests, keep)
  return [rows[request.index] for request in requests], timing


class _Peekable:
  """An iterator that knows whether there is more."""

  def __init__(self, items: Iterable[Request]):
    self._items: Iterator[Request] = iter(items)
    self._next: Request | None = next(self._items, None)

  def __bool__(self) -> bool:
    return self._next is not None

  def peek(self) -> Request:
    assert self._next is not None
    return self._next

  def take(self) -> Request:
    item = self._next
    assert item is not None
    self._next = next(self._items, None)
    return item


def _announce(row: Row, on_finished: Callable[[Row], object]) -> None:
  row.ended_s = time.perf_counter()
  on_finished(row)


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
