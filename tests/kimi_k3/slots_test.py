"""Rows in slots: whatever shares the batch with a row, and whatever was in its slot before, its answers are its own.

The measure is the same prompt in an engine of one slot. Random schedules are drawn by hypothesis, which prints the
shortest one that fails; `make soak` draws them for SOAK_MINUTES.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

TOLERANCE = 1e-4  # of the largest logit: the golden cases' own, see model_test.py
TIE = 2e-6  # of a router's score: closer ones may change places by float32 noise, which moves a score by up to 1e-6
SLOTS = 5
BUCKETS = (8, 130)
STEPS = 12  # that a row may take: the ring of generated latents wraps all the time
SEEDS = 6  # different texts a length


def prompt_of(length: int, seed: int) -> list[int]:
  return np.random.default_rng((length, seed)).integers(0, 252, length).tolist()


def padded(prompt: list[int]) -> np.ndarray:
  tokens = np.full(next(b for b in BUCKETS if b >= len(prompt)), 9, np.int32)  # what stands in the pads must not matter
  tokens[: len(prompt)] = prompt
  return tokens


@dataclasses.dataclass
class Alone:
  """What a row says when nobody else is there: logits [1 + STEPS, X], and the greedy tokens they choose."""

  logits: np.ndarray
  tokens: list[int]


class World:
  """An engine of several slots, one of a single slot as the measure, and the numpy reference as the judge of ties."""

  def __init__(self, checkpoint: Path, config_of: Any, reference: ModuleType):
    from kimi_k3.maxtext_adapter.engine import Engine

    def engine(slots: int) -> Engine:
      lengths = {"max_prefill_predict_length": max(BUCKETS), "max_target_length": max(BUCKETS) + STEPS}
      return Engine(config_of(**lengths, per_device_batch_size=slots))

    self.engine, self._single = engine(SLOTS), engine(1)
    self._reference, self._checkpoint = reference, reference.load_checkpoint(checkpoint)
    self.alone = functools.cache(self._alone)
    self.ties = self.compared = 0

  def _alone(self, length: int, seed: int) -> Alone:
    prompt, engine = prompt_of(length, seed), self._single
    prefilled = engine.prefill(padded(prompt), length)
    engine.insert(prefilled, 0)
    logits, tokens = [np.asarray(prefilled.logits)], []
    for _ in range(STEPS):
      tokens.append(int(np.argmax(logits[-1])))
      logits.append(np.asarray(engine.step(np.array(tokens[-1:])))[0])
    engine.release(0)
    return Alone(np.array(logits), [*tokens, int(np.argmax(logits[-1]))])

  def check(self, found: np.ndarray, row: Row) -> None:
    """Compares the logits after `row.steps` generated tokens with those of the row alone, and the token they choose."""
    alone = self.alone(row.length, row.seed)
    expected = alone.logits[row.steps]
    bound = TOLERANCE * np.abs(expected).max()
    error = np.abs(found - expected).max()
    self.compared += 1
    if error <= bound:
      first, second = np.sort(expected)[-2:][::-1]
      assert np.argmax(found) == alone.tokens[row.steps] or first - second <= 2 * bound
    elif not np.isfinite(error) or self._margin(row) > TIE:
      raise AssertionError(f"{row}: logits off by {error:.2e}, bound {bound:.2e}")
    else:
      self.ties += 1

  def _margin(self, row: Row) -> float:
    """The closest choice of an expert in the row's text so far."""
    ids = [*prompt_of(row.length, row.seed), *self.alone(row.length, row.seed).tokens[: row.steps]]
    layers = self._reference.forward(self._checkpoint, np.array([ids]), trace=True)["layers"]
    return min(layer["router_margin"].min() for layer in layers if "router_margin" in layer)

  def slot_caches(self) -> list[list[np.ndarray]]:
    """For each slot, a copy of all that is cached there."""
    leaves = jax.tree.leaves(self.engine.cache)
    axes = jax.tree.leaves(self.engine.cache_axes, is_leaf=lambda x: isinstance(x, tuple))
    assert len(leaves) == len(axes)
    by_row = [
      np.moveaxis(np.array(leaf), a.index("cache_batch"), 0)
      for leaf, a in zip(leaves, axes, strict=True)
      if "cache_batch" in a
    ]
    return [[leaf[slot] for leaf in by_row] for slot in range(SLOTS)]


@dataclasses.dataclass
class Row:
  """A row in flight: its text, and the tokens generated so far."""

  length: int
  seed: int
  steps: int = 0


def step(world: World, rows: dict[int, Row]) -> None:
  """Feeds each row the token it chooses alone; compares the answers, and that no other slot was touched."""
  tokens = np.zeros(SLOTS, np.int32)
  for slot, row in rows.items():
    tokens[slot] = world.alone(row.length, row.seed).tokens[row.steps]
  before = world.slot_caches()
  logits = np.asarray(world.engine.step(tokens))
  after = world.slot_caches()
  for slot in range(SLOTS):
    if slot in rows:
      rows[slot].steps += 1
      world.check(logits[slot], rows[slot])
    else:
      for old, new in zip(before[slot], after[slot], strict=True):
        assert old.tobytes() == new.tobytes(), f"slot {slot} has no row and was written to"


class Schedule(stateful.RuleBasedStateMachine):
  """Prompts run, wait, enter slots, step and leave in any order."""

  world: World

  def __init__(self):
    super().__init__()
    self.rows: dict[int, Row] = {}
    self.waiting: list[tuple[Row, Any]] = []

  def free(self) -> list[int]:
    return [slot for slot in range(SLOTS) if slot not in self.rows]

  @stateful.precondition(lambda self: len(self.waiting) < 3)
  @stateful.rule(
    length=st.one_of(st.integers(1, 10), st.integers(60, 68), st.integers(1, max(BUCKETS))),
    seed=st.integers(0, SEEDS - 1),
  )
  def prefill(self, length: int, seed: int) -> None:
    prompt = self.world.engine.prefill(padded(prompt_of(length, seed)), length)
    row = Row(length, seed)
    self.world.check(np.asarray(prompt.logits), row)
    self.waiting.append((row, prompt))

  @stateful.precondition(lambda self: self.waiting and self.free())
  @stateful.rule(data=st.data())
  def insert(self, data: st.DataObject) -> None:
    row, prompt = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1), "waiting"))
    slots = data.draw(st.lists(st.sampled_from(self.free()), min_size=1, max_size=2, unique=True), "slots")
    self.world.engine.insert(prompt, *slots)
    for slot in slots:
      self.rows[slot] = dataclasses.replace(row)

  @stateful.precondition(lambda self: all(row.steps < STEPS for row in self.rows.values()))
  @stateful.rule(count=st.integers(1, 4))
  def step(self, count: int) -> None:
    for _ in range(min([count, *(STEPS - row.steps for row in self.rows.values())])):
      step(self.world, self.rows)

  @stateful.precondition(lambda self: self.rows)
  @stateful.rule(data=st.data())
  def release(self, data: st.DataObject) -> None:
    slot = data.draw(st.sampled_from(sorted(self.rows)), "slot")
    self.world.engine.release(slot)
    del self.rows[slot]
    assert not any(leaf.any() for leaf in self.world.slot_caches()[slot]), f"slot {slot} is not clean"

  def teardown(self) -> None:
    for slot in list(self.rows):
      self.world.engine.release(slot)


@pytest.fixture(scope="module", params=["k3_tiny", pytest.param("kimi_linear_tiny", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, convert, float32_config, reference) -> World:
  case = request.getfixturevalue(request.param)
  out = convert(case.checkpoint, "--scan")
  return World(case.checkpoint, lambda **settings: float32_config(out, **settings), reference)


def test_ragged_rows_in_permuted_and_used_slots_answer_as_alone(world):
  lengths = [1, 5, 64, 130, 37, 2, 65, 8, 3, 100]
  order, rows = [3, 0, 4, 1, 2], {}
  waiting = [(Row(n, 0), world.engine.prefill(padded(prompt_of(n, 0)), n)) for n in lengths[:3]]  # three in flight
  for slot, (row, prompt) in zip(order, waiting, strict=False):
    world.check(np.asarray(prompt.logits), row)
    world.engine.insert(prompt, slot)
    rows[slot] = row
  for n in lengths[3:]:  # each enters in mid-decode; the fullest row makes room where there is none
    for _ in range(2):
      step(world, rows)
    if len(rows) == SLOTS:
      slot = max(rows, key=lambda s: rows[s].steps)
      world.engine.release(slot)
      del rows[slot]
    slot = next(s for s in order if s not in rows)
    prompt = world.engine.prefill(padded(prompt_of(n, 0)), n)
    world.engine.insert(prompt, slot)
    rows[slot] = Row(n, 0)
  for _ in range(3):
    step(world, rows)
  for slot in rows:
    world.engine.release(slot)
  assert world.ties == 0  # none of these texts comes near one


def test_a_step_of_no_row_changes_nothing(world):
  before = world.slot_caches()
  assert not any(leaf.any() for slot in before for leaf in slot)
  logits = np.asarray(world.engine.step(np.full(SLOTS, 7, np.int32)))
  assert not logits.any()  # what is empty is 0 all the way up
  after = world.slot_caches()
  assert all(a.tobytes() == b.tobytes() for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))


def test_a_row_that_is_not_finite_spoils_no_other_and_leaves_a_clean_slot(world):
  embedding = world.engine.params["token_embedder"]["embedding"]
  good = embedding[...]
  rows = {slot: Row(length, 1) for slot, length in ((0, 5), (2, 64), (4, 3))}
  used = {t for n in (5, 64, 3, 37) for t in (*prompt_of(n, 1), *world.alone(n, 1).tokens)}
  bad = next(t for t in range(10, 252) if t not in used)
  try:
    for slot, row in rows.items():
      world.engine.insert(world.engine.prefill(padded(prompt_of(row.length, 1)), row.length), slot)
    poisoned = world.engine.prefill(padded([*prompt_of(4, 1), 3]), 5)
    world.engine.insert(poisoned, 3)
    embedding[...] = good.at[bad].set(np.nan)
    for feed in (bad, 3, 3):  # once a token has made it so, it stays so
      tokens = np.full(SLOTS, feed)
      for slot, row in rows.items():
        tokens[slot] = world.alone(row.length, 1).tokens[row.steps]
      logits = np.asarray(world.engine.step(tokens))
      assert np.isnan(logits[3]).all()
      for slot, row in rows.items():
        row.steps += 1
        world.check(logits[slot], row)
    prompt = world.engine.prefill(padded([bad, 3]), 2)
    assert np.isnan(np.asarray(prompt.logits)).all()
    in_pads = padded([1, 2, 3])
    in_pads[3:] = bad
    expected = world.engine.prefill(padded([1, 2, 3]), 3).logits
    np.testing.assert_array_equal(world.engine.prefill(in_pads, 3).logits, expected)
    world.engine.release(3)
    step(world, rows)
    world.engine.insert(world.engine.prefill(padded(prompt_of(37, 1)), 37), 3)
    rows[3] = Row(37, 1)
    step(world, rows)
  finally:
    embedding[...] = good
    for slot in rows:
      world.engine.release(slot)


def test_nothing_is_traced_again_as_lengths_and_slots_change(world):
  upstream = type(world.engine._engine)
  jitted = {name: getattr(upstream, name) for name in ("_prefill_jit", "_generate_jit", "_insert_jit", "_release")}
  prompts = [world.engine.prefill(padded(prompt_of(length, 2)), length) for length in (1, 8, 2, 7)]
  world.engine.insert(prompts[0], 2)
  world.engine.step(np.zeros(SLOTS, np.int32))
  assert all(function._cache_size() for function in jitted.values())
  before = {name: function._cache_size() for name, function in jitted.items()}
  for slot, prompt in zip((4, 0, 1), prompts[1:], strict=True):
    world.engine.insert(prompt, slot)
    world.engine.step(np.zeros(SLOTS, np.int32))
  for slot in (4, 0, 1, 2):
    world.engine.release(slot)
    world.engine.step(np.zeros(SLOTS, np.int32))
  assert {name: function._cache_size() for name, function in jitted.items()} == before


def test_a_row_whose_cache_is_full_is_refused_before_the_step(world):
  world.engine.insert(world.engine.prefill(padded([1, 2]), 2), 1)
  for _ in range(STEPS):
    world.engine.step(np.ones(SLOTS, np.int32))
  with pytest.raises(ValueError, match=f"slot 1: the cache holds {STEPS} generated tokens .* and is full"):
    world.engine.step(np.ones(SLOTS, np.int32))
  world.engine.release(1)


def test_misuse_of_slots_and_prompts_is_refused_and_changes_nothing(world):
  engine = world.engine
  prompt = engine.prefill(padded([1, 2, 3]), 3)
  engine.insert(prompt, 1)
  before = world.slot_caches()
  other = engine.prefill(padded([4, 5]), 2)
  for slots, message in (
    ((-1,), f"slot -1: there are {SLOTS}"),
    ((SLOTS,), f"slot {SLOTS}: there are {SLOTS}"),
    ((0, 99), f"slot 99: there are {SLOTS}"),
    ((0, 0), r"slots \[0, 0\]: expected each once"),
    ((), "at least one"),
    ((1,), "slot 1 is in use: release it first"),
    ((0, 1), "slot 1 is in use"),
  ):
    with pytest.raises(ValueError, match=message):
      engine.insert(other, *slots)
  with pytest.raises(ValueError, match="inserted before"):
    engine.insert(prompt, 0)
  for slot, message in ((0, "slot 0 is empty"), (-1, "slot -1: there"), (SLOTS, f"slot {SLOTS}: there")):
    with pytest.raises(ValueError, match=message):
      engine.release(slot)
  for tokens, length in ((padded([1]), 0), (padded([1]), -1), (padded([1]), 9)):
    with pytest.raises(ValueError, match=f"true_length {length} of 8 tokens"):
      engine.prefill(tokens, length)
  for tokens, found in (([1, 256], "256"), ([1, -1], "-1")):
    with pytest.raises(ValueError, match=f"tokens of a prompt: {found} outside the vocabulary of 256"):
      engine.prefill(np.array(tokens), 2)
  with pytest.raises(ValueError, match=r"expected integers in 1 axis, found float64\[2\]"):
    engine.prefill(np.array([1.0, 2.0]), 2)
  for tokens, message in (
    ([1], f"1 tokens for {SLOTS} slots"),
    ([1] * (SLOTS + 1), f"{SLOTS + 1} tokens for {SLOTS} slots"),
    ([1.5] * SLOTS, "expected integers in 1 axis, found float64"),
    ([[1] * SLOTS], rf"expected integers in 1 axis, found int64\[1, {SLOTS}\]"),
    ([256] * SLOTS, "256, 256, .* outside the vocabulary of 256"),
  ):
    with pytest.raises(ValueError, match=message):
      engine.step(np.array(tokens))
  with pytest.raises(ValueError, match="a prompt of 131 tokens: max_prefill_predict_length is 130"):
    engine.prefill(np.zeros(131, np.int32), 3)
  after = world.slot_caches()
  assert all(a.tobytes() == b.tobytes() for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
  engine.release(1)


def test_random_schedules_find_no_difference(world):
  minutes = float(os.environ.get("SOAK_MINUTES", "0"))
  machine = type("ScheduleOf", (Schedule,), {"world": world})
  common = hypothesis.settings(
    deadline=None,
    database=None,
    stateful_step_count=25,
    suppress_health_check=(hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much),
    print_blob=True,
  )
  end, examples, seed = time.monotonic() + minutes * 60 / 2, 0, 1  # half for each model
  while True:
    seeded = hypothesis.seed(seed)(machine)
    stateful.run_state_machine_as_test(seeded, settings=hypothesis.settings(common, max_examples=8))
    examples, seed = examples + 8, random.Random(seed).getrandbits(64)
    if time.monotonic() >= end:
      break
  assert world.ties <= 1 + world.compared / 1000  # an excuse that is often needed excuses something else
  print(f"{examples} schedules, {world.compared} comparisons, {world.ties} of them at a tie of experts")
