"""The loop on an engine whose language is arithmetic: the next token is a sum of what stood before."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.loop import Request, Row, Timing, generate
from kimi_k3.generate.sampling import GREEDY, WEIGHTED, Sampler

VOCABULARY = 11
GREEDILY = Sampler(GREEDY, 1.0, 0)
MAX_PROMPT = 300


class NoClock(CompileClock):
  """No time is spent compiling."""

  def __init__(self):
    pass

  def compiling(self, start: float, end: float) -> float:
    del start, end
    return 0.0


def next_token(history: list[int]) -> int:
  return (3 * history[-1] + sum(history) + 1) % VOCABULARY


def continuation(prompt: list[int], count: int) -> list[int]:
  history = list(prompt)
  for _ in range(count):
    history.append(next_token(history))
  return history[len(prompt) :]


@dataclasses.dataclass
class Prompt:
  """What the engine gives for a prompt."""

  history: list[int]
  logits: jnp.ndarray


@dataclasses.dataclass
class ArithmeticEngine:
  """Keeps each slot's history; empty slots give NaN, as an engine's may.

  Attributes:
    num_slots: Rows at a time.
    broken: Histories from which logits are not finite.
    calls: ("prefill", padded length), ("insert", slot), ("step", tokens fed) and ("release", slot).
  """

  num_slots: int
  broken: tuple[tuple[int, ...], ...] = ()
  calls: list[tuple] = dataclasses.field(default_factory=list)
  histories: dict[int, list[int]] = dataclasses.field(default_factory=dict)

  def logits(self, history: list[int] | None) -> np.ndarray:
    if history is None or tuple(history) in self.broken:
      return np.full(VOCABULARY, np.nan, np.float32)
    return np.eye(VOCABULARY, dtype=np.float32)[next_token(history)]

  def prefill(self, tokens: np.ndarray, true_length: int) -> Prompt:
    self.calls.append(("prefill", len(tokens)))
    assert not tokens[true_length:].any()
    history = tokens[:true_length].tolist()
    return Prompt(history, jnp.asarray(self.logits(history)))

  def insert(self, prompt: Prompt, *slots: int) -> None:
    (slot,) = slots
    assert 0 <= slot < self.num_slots
    assert slot not in self.histories, "in use"
    self.calls.append(("insert", slot))
    self.histories[slot] = prompt.history

  def release(self, slot: int) -> None:
    self.calls.append(("release", slot))
    del self.histories[slot]

  def step(self, tokens: np.ndarray) -> jnp.ndarray:
    assert len(tokens) == self.num_slots
    self.calls.append(("step", tokens.tolist()))
    for slot, history in self.histories.items():
      history.append(int(tokens[slot]))
    return jnp.asarray([self.logits(self.histories.get(slot)) for slot in range(self.num_slots)])

  def called(self, name: str) -> list:
    return [call[1] for call in self.calls if call[0] == name]

  @property
  def inserted(self) -> list[int]:
    return self.called("insert")


def run(prompts, *, slots=2, new=6, stop=None, broken=(), sampler=GREEDILY, finished=None):
  engine = ArithmeticEngine(slots, tuple(map(tuple, broken)))
  request = Request(new, stop, sampler, MAX_PROMPT)
  on_finished = (lambda row: finished.append(row.index)) if finished is not None else (lambda _: None)
  rows, timing = generate(engine, prompts, request, clock=NoClock(), on_finished=on_finished)
  assert engine.histories == {}, "every slot is released"
  return rows, timing, engine


PROMPTS = [[1], [2, 3, 5], [7, 7], [4, 9, 2, 6], [10]]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_any_number_of_slots_gives_each_row_its_own_continuation_in_input_order(slots):
  rows, _, _ = run(PROMPTS, slots=slots)
  assert rows == [Row(i, p, continuation(p, 6), "length") for i, p in enumerate(PROMPTS)]


def test_rows_wait_for_slots_and_a_freed_slot_is_used_again():
  _, _, engine = run(PROMPTS, slots=2)
  assert engine.inserted == [0, 1, 0, 1, 0]
  assert engine.called("release") == [0, 1, 0, 1, 0]


def test_a_row_that_ends_early_makes_room_at_once():
  stop = continuation([1], 2)[-1]
  assert stop not in continuation([2, 3, 5], 6)
  rows, _, engine = run([[1], [2, 3, 5], [10]], slots=2, stop=stop)
  assert rows[0].ids == continuation([1], 2)
  # Rows 0 and 1 start, one step ends row 0, row 2 takes its slot while row 1 goes on.
  expected = [*["prefill", "insert"] * 2, "step", "release", "prefill", "insert"]
  assert [call[0] for call in engine.calls[: len(expected)]] == expected
  assert engine.inserted == [0, 1, 0]


def test_the_end_token_is_kept_and_ends_the_row():
  full = continuation([4, 9], 8)
  stop = full[3]
  rows, _, _ = run([[4, 9]], new=8, stop=stop)
  assert rows[0].ids == full[: full.index(stop) + 1]
  assert rows[0].finish_reason == "stop"
  assert rows[0].error is None


def test_the_first_token_can_be_the_end():
  rows, timing, engine = run([[1], [2, 3, 5]], new=8, stop=next_token([1]))
  assert rows[0] == Row(0, [1], [next_token([1])], "stop")
  assert engine.inserted == [0], "the row that ended took no slot from the next"
  assert len(timing.first_token) == 2


def test_the_end_token_as_the_last_allowed_one_is_an_end():
  full = continuation([6], 3)
  assert full[2] not in full[:2]
  rows, _, _ = run([[6]], new=3, stop=full[2])
  assert rows[0].finish_reason == "stop"


def test_without_an_end_token_a_row_goes_on_to_its_length():
  rows, _, _ = run([[4, 9]], new=40, stop=None)
  assert rows[0].ids == continuation([4, 9], 40)
  assert rows[0].finish_reason == "length"


def test_one_new_token_needs_no_step():
  rows, timing, engine = run(PROMPTS, new=1)
  assert [row.ids for row in rows] == [continuation(p, 1) for p in PROMPTS]
  assert [call[0] for call in engine.calls] == ["prefill"] * len(PROMPTS)
  assert timing.steps == []
  assert "0.0 tok/s (no decoding step)" in timing.summary()


def test_a_row_whose_logits_are_not_finite_ends_alone_and_keeps_what_it_had():
  ids = continuation([2, 3, 5], 3)
  rows, _, engine = run(PROMPTS, broken=[[2, 3, 5, *ids]])
  assert rows[1] == Row(1, [2, 3, 5], ids, "error", "logits of new token 3 are not finite")
  for i in (0, 2, 3, 4):
    assert rows[i] == Row(i, PROMPTS[i], continuation(PROMPTS[i], 6), "length")
  assert engine.inserted.count(1) > 1, "its slot is used again"


def test_a_prompt_whose_logits_are_not_finite_ends_before_its_first_token():
  rows, _, engine = run(PROMPTS, broken=[[7, 7]])
  assert len(engine.inserted) == 4
  assert rows[2] == Row(2, [7, 7], [], "error", "logits of new token 0 are not finite")
  assert [row.finish_reason for row in rows] == ["length", "length", "error", "length", "length"]


def test_all_rows_may_fail():
  rows, _, _ = run([[1], [2]], slots=1, broken=[[1], [2]])
  assert [row.finish_reason for row in rows] == ["error", "error"]


def test_each_row_is_announced_once_as_it_ends():
  finished = []
  stop = continuation([2, 3, 5], 2)[-1]
  rows, _, _ = run(PROMPTS, slots=5, stop=stop, finished=finished)
  assert sorted(finished) == [0, 1, 2, 3, 4]
  lengths = [len(rows[i].ids) for i in finished]
  assert lengths == sorted(lengths)
  assert len(set(lengths)) > 1


def test_prompts_are_padded_to_a_bucket_that_the_cache_holds():
  _, _, engine = run([[1] * 5, [1] * 256, [1] * 257], slots=3, new=1)
  assert engine.calls == [("prefill", 256), ("prefill", 256), ("prefill", MAX_PROMPT)]


def test_each_slot_is_fed_the_last_token_of_its_row():
  _, _, engine = run([[1], [2, 3, 5]], slots=3, new=3)
  first, second = continuation([1], 2), continuation([2, 3, 5], 2)
  assert engine.called("step") == [[first[0], second[0], 0], [first[1], second[1], 0]]


def test_draws_of_a_row_depend_on_its_number_and_step_alone():
  """The engine's logits are nearly flat here, so every token is a draw."""

  class Flat(ArithmeticEngine):
    def logits(self, history: list[int] | None) -> np.ndarray:
      return super().logits(history) * 0.1

  def draws(slots: int, prompts, new: int = 12) -> list[list[int]]:
    request = Request(new, None, Sampler(WEIGHTED, 1.0, 3), MAX_PROMPT)
    return [row.ids for row in generate(Flat(slots), prompts, request, clock=NoClock())[0]]

  alone = draws(1, PROMPTS)
  assert draws(5, PROMPTS) == draws(2, PROMPTS) == alone
  assert draws(5, PROMPTS[:2]) == alone[:2]
  # Equal prompts get draws of their own: of 40 from 11 tokens, some 4 agree by chance.
  first, second = draws(2, PROMPTS[:1] * 2, new=40)
  assert sum(a == b for a, b in zip(first[1:], second[1:], strict=True)) < 15


def test_prompts_are_not_changed():
  prompts = [[1, 2], [3]]
  rows, _, _ = run(prompts)
  assert prompts == [[1, 2], [3]]
  assert rows[0].prompt_ids is not prompts[0]


def test_timing_counts_tokens_of_steps_and_takes_compiling_out():
  class HalfOfIt(NoClock):
    def compiling(self, start: float, end: float) -> float:
      return (end - start) / 2

  rows, timing = generate(ArithmeticEngine(2), PROMPTS, Request(4, None, GREEDILY, MAX_PROMPT), clock=HalfOfIt())
  assert len(timing.first_token) == len(PROMPTS)
  assert timing.step_tokens == sum(len(row.ids) for row in rows) - len(PROMPTS)
  assert timing.compiling == pytest.approx(sum(timing.first_token) + sum(timing.steps))


def test_the_summary_is_one_line():
  timing = Timing(first_token=[0.1, 0.3, 0.2], steps=[0.01, 0.03], step_tokens=8, compiling=12.34)
  expected = "time to first token 200.0 ms (median), 200.0 tok/s (20.0 ms a step, median), compile 12.3 s apart"
  assert timing.summary() == expected
  assert Timing().summary() == "no token, 0.0 tok/s (no decoding step), compile 0.0 s apart"
