"""Rows through slots, on an engine whose language is arithmetic: the next token is a sum of what stood before."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.errors import InputError
from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.device_loop import Decoded
from kimi_k3.generate.host_loop import decode_by_steps
from kimi_k3.generate.loop import Call, Generator, Request, Row, SlotEngine, Timing, generate
from kimi_k3.generate.sampling import SamplingOptions

VOCABULARY = 11
GREEDILY = SamplingOptions()
MAX_PROMPT, MAX_STEPS, MAX_SLOTS = 300, 100, 8


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


def continuation_of(prompt: list[int], count: int) -> list[int]:
  return [*prompt, *continuation(prompt, count)]


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
    max_prompt: Tokens of a prompt.
    max_steps: Steps of a row.
    together: Prompts that are run together.
    calls: ("together", prompts), ("prefill", padded length), ("insert", slot), ("step", tokens fed), ("release", slot).
  """

  num_slots: int
  broken: tuple[tuple[int, ...], ...] = ()
  max_prompt: int = MAX_PROMPT
  max_steps: int = MAX_STEPS
  together: int = 1
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

  def rows_together(self, tokens: int) -> int:
    del tokens
    return self.together

  def prefill_together(self, prompts, true_lengths) -> list[Prompt]:
    assert len({len(prompt) for prompt in prompts}) == 1
    assert len(prompts) <= self.together
    self.calls.append(("together", len(prompts)))
    return [self.prefill(*one) for one in zip(prompts, true_lengths, strict=True)]

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

  def decode(self, rows, plan, *, buffer: int):
    """Chooses for 8 rows whatever the slots: one program for all tests."""
    more = MAX_SLOTS - self.num_slots
    used = [slot in self.histories for slot in range(MAX_SLOTS)]

    def step(tokens):
      return jnp.pad(self.step(tokens[: self.num_slots]), ((0, more), (0, 0)))

    padded = jax.tree.map(lambda x: np.pad(x, (0, more)), rows)
    found = decode_by_steps(step, padded, used, plan, buffer=buffer)
    return Decoded(*(x[: self.num_slots] for x in found[:3]), found.steps)

  def called(self, name: str) -> list:
    return [call[1] for call in self.calls if call[0] == name]

  @property
  def inserted(self) -> list[int]:
    return self.called("insert")


def requests_of(prompts, new: int, sampling=GREEDILY) -> list[Request]:
  return [Request(i, prompt, new, sampling) for i, prompt in enumerate(prompts)]


def run(prompts, *, slots=2, new=6, stop=None, broken=(), sampling=GREEDILY, finished=None, **options):
  engine = ArithmeticEngine(slots, tuple(map(tuple, broken)))
  assert isinstance(engine, SlotEngine)
  on_finished = (lambda row: finished.append(row.index)) if finished is not None else (lambda _: None)
  stop_ids = () if stop is None else (stop,)
  options = {"stop_ids": stop_ids, "clock": NoClock(), "on_finished": on_finished} | options
  rows, timing = generate(engine, requests_of(prompts, new, sampling), **options)
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
  calls = [call[0] for call in engine.calls if call[0] != "together"]
  assert calls[: len(expected)] == expected
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
  assert [call[0] for call in engine.calls if call[0] != "together"] == ["prefill"] * len(PROMPTS)
  assert timing.calls == []
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
  assert engine.called("prefill") == [256, 256, MAX_PROMPT]


@pytest.mark.parametrize("slots", [1, 3, 5, 8])
def test_waiting_prompts_of_one_padded_length_are_run_together_where_there_are_slots(slots):
  prompts = [*PROMPTS, [1] * 257, [2] * 258, [3], [5]]
  broken = [continuation_of([2, 3, 5], 2)]
  engine = ArithmeticEngine(slots, tuple(map(tuple, broken)), together=4)
  rows, timing = generate(engine, requests_of(prompts, 6), stop_ids=(), clock=NoClock())
  expected, _, _ = run(prompts, slots=2, broken=broken)
  assert rows == expected
  groups = engine.called("together")
  assert sum(groups) == len(prompts) == len(timing.first_token)
  assert groups[0] == min(slots, 4)
  if slots == 8:
    assert groups == [4, 1, 2, 1, 1], "those of another padded length, and those without a slot, come later"


def test_each_slot_is_fed_the_last_token_of_its_row():
  _, _, engine = run([[1], [2, 3, 5]], slots=3, new=3)
  first, second = continuation([1], 2), continuation([2, 3, 5], 2)
  assert engine.called("step") == [[first[0], second[0], 0], [first[1], second[1], 0]]


class Flat(ArithmeticEngine):
  """Its logits are nearly equal, so every token is a draw."""

  def logits(self, history: list[int] | None) -> np.ndarray:
    return super().logits(history) * 0.1


def draws(slots: int, requests: list[Request], seed: int = 3) -> list[list[int]]:
  return [row.ids for row in generate(Flat(slots), requests, stop_ids=(), clock=NoClock(), seed=seed)[0]]


def test_draws_of_a_row_depend_on_its_number_and_step_alone():
  warm = SamplingOptions(temperature=1.0)
  alone = draws(1, requests_of(PROMPTS, 12, warm))
  assert draws(5, requests_of(PROMPTS, 12, warm)) == draws(2, requests_of(PROMPTS, 12, warm)) == alone
  assert draws(5, requests_of(PROMPTS[:2], 12, warm)) == alone[:2]
  assert draws(2, requests_of(PROMPTS, 12, warm)[::-1]) == alone[::-1]
  assert draws(5, requests_of(PROMPTS, 12, warm), seed=4) != alone
  # Equal prompts get draws of their own: of 40 from 11 tokens, some 4 agree by chance.
  first, second = draws(2, requests_of(PROMPTS[:1] * 2, 40, warm))
  assert sum(a == b for a, b in zip(first[1:], second[1:], strict=True)) < 15


def test_a_rows_own_seed_decides_whatever_its_number_and_the_runs_seed():
  seeded = SamplingOptions(temperature=1.0, seed=9)
  first, second = draws(2, requests_of(PROMPTS[:1] * 2, 20, seeded))
  assert first == second == draws(1, [Request(77, PROMPTS[0], 20, seeded)], seed=1)[0]
  other = SamplingOptions(temperature=1.0, seed=10)
  assert draws(1, [Request(0, PROMPTS[0], 20, other)])[0] != first


def test_rows_choose_each_in_their_own_way_side_by_side():
  ways = [GREEDILY, SamplingOptions(temperature=1.0), SamplingOptions(temperature=1.0, top_k=1), GREEDILY]
  rows = [Request(i, [4, 9], 12, way) for i, way in enumerate(ways)]
  found = draws(4, rows)
  assert found[0] == found[2] == found[3] == continuation([4, 9], 12)
  assert found[1] != found[0]


def test_each_row_has_its_own_length():
  requests = [Request(i, prompt, new) for i, (prompt, new) in enumerate(zip(PROMPTS, (1, 9, 3, 20, 2), strict=True))]
  rows, _ = generate(ArithmeticEngine(2), requests, stop_ids=(), clock=NoClock(), steps_per_call=4)
  assert [row.ids for row in rows] == [continuation(r.prompt_ids, r.max_new_tokens) for r in requests]


@pytest.mark.parametrize("steps", [1, 3, 128])
def test_how_often_the_host_looks_changes_no_token(steps):
  stop = continuation([2, 3, 5], 2)[-1]
  expected, _, _ = run(PROMPTS, new=20, stop=stop)
  found, timing, _ = run(PROMPTS, new=20, stop=stop, steps_per_call=steps)
  assert found == expected
  assert max(call.steps for call in timing.calls) <= steps


def test_an_end_that_the_host_sees_cuts_off_what_the_device_made_behind_it():
  full = continuation([4, 9], 12)
  rows, _, engine = run([[4, 9], [1]], new=12, ends=lambda ids: ids == full[: len(ids)] and len(ids) == 5, slots=1)
  assert (rows[0].ids, rows[0].finish_reason) == (full[:5], "stop")
  assert (rows[1].ids, rows[1].finish_reason) == (continuation([1], 12), "length")
  assert len(engine.called("step")) == 22, "the device ran to the end of the call"


def test_a_request_that_does_not_fit_ends_alone_and_is_told():
  requests = [
    Request(0, [1], 3),
    Request(1, [1] * (MAX_PROMPT + 1), 3),
    Request(2, [1], MAX_STEPS + 2),
    Request(3, [], 3),
    Request(4, [1], 0),
    Request(5, [1], MAX_STEPS + 1),
  ]
  rows, timing = generate(ArithmeticEngine(2), requests, stop_ids=(), clock=NoClock())
  assert [row.finish_reason for row in rows] == ["length", "error", "error", "error", "error", "length"]
  assert rows[1].error == (
    "the prompt has 301 tokens, longer than the prompt cache: max_prefill_predict_length is 300; raise it"
  )
  assert rows[2].error is not None and rows[2].error.startswith("102 new tokens do not fit: the cache holds 100")
  assert rows[3].error == "the prompt is empty: expected one token or more"
  assert rows[4].error == "max_new_tokens is 0, expected 1 or more"
  assert len(rows[5].ids) == MAX_STEPS + 1, "the last token is not fed"
  assert len(timing.first_token) == 2


def test_requests_are_taken_only_as_slots_get_free():
  taken = []

  def endless():
    for i in itertools.count():
      taken.append(i)
      yield Request(i, [1], 3)

  engine = ArithmeticEngine(2)
  generator = Generator(engine, stop_ids=(), clock=NoClock())
  ended = []

  def stop_after_four(row: Row) -> None:
    ended.append(row.index)
    if len(ended) == 4:
      generator.stop()

  generator.run(endless(), stop_after_four)
  assert ended == [0, 1, 2, 3]
  assert len(taken) <= 4 + 2 + 1, "those in slots, and one to know that more wait"
  assert engine.histories == {}


def test_a_cancelled_row_ends_with_what_it_has_and_makes_room():
  engine = ArithmeticEngine(2)
  generator = Generator(engine, stop_ids=(), clock=NoClock(), steps_per_call=2)
  rows: dict[int, Row] = {}
  generator.cancel(3)  # before it has started

  def progress(_: int) -> None:
    if 1 not in rows and engine.histories.get(1, [])[:3] == PROMPTS[1] and len(engine.histories[1]) > 5:
      generator.cancel(1)

  generator.run(requests_of(PROMPTS, 12), lambda row: rows.update({row.index: row}), progress)
  assert rows[1].error == rows[3].error == "cancelled"
  assert rows[1].finish_reason == "error"
  assert 1 < len(rows[1].ids) < 12
  assert rows[1].ids == continuation(PROMPTS[1], len(rows[1].ids))
  assert rows[3].ids == []
  for i in (0, 2, 4):
    assert rows[i] == Row(i, PROMPTS[i], continuation(PROMPTS[i], 12), "length")
  assert engine.histories == {}


def test_an_error_of_the_caller_leaves_all_slots_free():
  engine = ArithmeticEngine(3)

  def full(_: Row) -> None:
    raise OSError("no space left")

  with pytest.raises(OSError, match="no space left"):
    generate(engine, requests_of(PROMPTS, 6), stop_ids=(), clock=NoClock(), on_finished=full)
  assert engine.histories == {}


def test_an_error_of_the_caller_among_prompts_that_are_run_together_leaves_all_slots_free():
  engine = ArithmeticEngine(3, together=4)
  requests = [Request(0, [1], 1), *(Request(i, [1], 6) for i in (1, 2))]  # the first ends with its first token

  def full(_: Row) -> None:
    raise OSError("no space left")

  with pytest.raises(OSError, match="no space left"):
    generate(engine, requests, stop_ids=(), clock=NoClock(), on_finished=full)
  assert engine.inserted == [0, 1]
  assert engine.histories == {}


def test_progress_counts_every_new_token_once():
  counted = []
  generator = Generator(ArithmeticEngine(2), stop_ids=(), clock=NoClock())
  total = []
  generator.run(requests_of(PROMPTS, 6), lambda row: total.append(len(row.ids)), counted.append)
  assert sum(counted) == sum(total) == 30


def test_rows_know_when_they_began_spoke_and_ended():
  rows, _, _ = run(PROMPTS)
  for row in rows:
    assert row.started_s is not None and row.first_token_s is not None and row.ended_s is not None
    assert row.started_s <= row.first_token_s <= row.ended_s


def test_more_end_tokens_than_the_program_has_room_for_are_refused():
  with pytest.raises(InputError, match="5 stop tokens, expected 4 at most"):
    Generator(ArithmeticEngine(1), stop_ids=range(5), clock=NoClock())


def test_prompts_are_not_changed():
  prompts = [[1, 2], [3]]
  rows, _, _ = run(prompts)
  assert prompts == [[1, 2], [3]]
  assert rows[0].prompt_ids is not prompts[0]


def test_timing_counts_tokens_of_steps_and_takes_compiling_out():
  class HalfOfIt(NoClock):
    def compiling(self, start: float, end: float) -> float:
      return (end - start) / 2

  rows, timing = generate(ArithmeticEngine(2), requests_of(PROMPTS, 4), stop_ids=(), clock=HalfOfIt())
  assert len(timing.first_token) == len(PROMPTS)
  assert sum(call.tokens for call in timing.calls) == sum(len(row.ids) for row in rows) - len(PROMPTS)
  assert timing.compiling == pytest.approx(sum(timing.first_token) + sum(call.seconds for call in timing.calls))


def test_the_summary_is_one_line():
  calls = [Call(0.02, 2, 6), Call(0.06, 2, 2)]
  timing = Timing(first_token=[0.1, 0.3, 0.2], calls=calls, compiling=12.34)
  expected = "time to first token 200.0 ms (median), 100.0 tok/s (20.0 ms a step, median), compile 12.3 s apart"
  assert timing.summary() == expected
  assert Timing().summary() == "no token, 0.0 tok/s (no decoding step), compile 0.0 s apart"
