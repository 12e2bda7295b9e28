"""The loop on the device against the one on the host, on a model whose language is arithmetic, and on K3."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_k3.generate.clock import CompileClock
from kimi_k3.generate.device_loop import (
  LENGTH,
  NOT_FINITE,
  NUM_STOP_IDS,
  RUNNING,
  STOP,
  Plan,
  Rows,
  decode_loop,
  decoded,
)
from kimi_k3.generate.host_loop import decode_by_steps
from kimi_k3.generate.loop import Request, generate
from kimi_k3.generate.sampling import Draws, SamplingOptions

SLOTS, VOCABULARY, BUFFER = 5, 13, 12
POISON = 7  # a row that has been fed so many tokens in sum gives logits that are not finite


def arithmetic(state: Any, tokens: Any, active: Any) -> tuple[Any, Any]:
  """Logits favour a number that hangs on all tokens fed so far; a row that is not active stays as it is."""
  total = jnp.where(active, state + tokens, state)
  logits = jnp.sin(total[:, None] * (1.0 + jnp.arange(VOCABULARY))[None])
  return jnp.where((total % 19 == POISON)[:, None], jnp.nan, logits), total


@functools.cache
def program():
  def run(state, rows, active, plan):
    return decode_loop(arithmetic, state, rows, active, plan, buffer=BUFFER)

  return jax.jit(run)


def rows_of(rng: np.random.Generator) -> Rows:
  counts = rng.integers(0, 4, SLOTS).astype(np.int32)
  ways = [SamplingOptions(), SamplingOptions(temperature=1.0), SamplingOptions(temperature=0.5, top_k=3, seed=4)]
  draws = Draws.of([ways[i] for i in rng.integers(0, 3, SLOTS)], list(range(SLOTS)), 11)
  limits = (counts + rng.integers(1, 20, SLOTS)).astype(np.int32)
  return Rows(rng.integers(0, VOCABULARY, SLOTS).astype(np.int32), counts, limits, draws)


def plan_of(rng: np.random.Generator) -> Plan:
  stop_ids = np.full(NUM_STOP_IDS, -1, np.int32)
  stop_ids[: rng.integers(0, 3)] = rng.integers(0, VOCABULARY)
  return Plan(stop_ids, np.int32(rng.choice([1, 5, BUFFER, 100])), np.int32(rng.integers(1, SLOTS + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_the_device_gives_what_a_call_a_step_gives(seed):
  rng = np.random.default_rng(seed)
  rows, plan, active = rows_of(rng), plan_of(rng), rng.random(SLOTS) < 0.8
  state = rng.integers(0, 50, SLOTS).astype(np.int32)
  after, packed = program()(state, rows, active, plan)
  found = decoded(np.asarray(packed))

  held = state

  def step(tokens):
    nonlocal held
    logits, held = arithmetic(held, tokens, active)
    return logits

  expected = decode_by_steps(step, rows, active.tolist(), plan, buffer=BUFFER)
  assert found.steps == expected.steps
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_array_equal(found.counts, expected.counts)
  np.testing.assert_array_equal(found.status[active], expected.status[active])
  running = active & (found.status == RUNNING)
  np.testing.assert_array_equal(np.asarray(after)[running | ~active], np.asarray(held)[running | ~active])
  assert program()._cache_size() == 1, "lengths, slots and ways to choose are not compiled in"


def test_the_cases_above_have_every_end():
  seen = set()
  for seed in range(40):
    rng = np.random.default_rng(seed)
    rows, plan, active = rows_of(rng), plan_of(rng), rng.random(SLOTS) < 0.8
    state = rng.integers(0, 50, SLOTS).astype(np.int32)
    found = decoded(np.asarray(program()(state, rows, active, plan)[1]))
    seen |= set(found.status[active].tolist())
  assert seen == {RUNNING, STOP, LENGTH, NOT_FINITE}


def test_no_rows_and_no_steps_change_nothing():
  rng = np.random.default_rng(0)
  rows, state = rows_of(rng), np.arange(SLOTS, dtype=np.int32)
  for active, steps in ((np.zeros(SLOTS, bool), 5), (np.ones(SLOTS, bool), 0)):
    plan = Plan(np.full(NUM_STOP_IDS, -1, np.int32), np.int32(steps), np.int32(1))
    after, packed = program()(state, rows, active, plan)
    assert decoded(np.asarray(packed)).steps == 0
    np.testing.assert_array_equal(after, state)


@pytest.mark.slow
def test_prompts_that_are_run_together_give_the_rows_that_each_gives_alone(
  k3_tiny, convert, float32_config, monkeypatch
):
  from kimi_k3.maxtext_adapter import spmd_engine
  from kimi_k3.maxtext_adapter.engine import make_engine

  lengths = {"max_prefill_predict_length": 300, "max_target_length": 312, "per_device_batch_size": 5}
  settings = ("partitioning=manual", "prefill_rows=4")
  engine = make_engine(float32_config(convert(k3_tiny.checkpoint, "--scan"), *settings, **lengths))
  assert [engine.rows_together(n) for n in (256, 2048, 4096, 5000)] == [4, 4, 2, 1]
  prompts = [list(k3_tiny.prompts[i % 3][: 1 + 17 * i]) for i in range(7)]
  requests = [Request(i, prompt, 12) for i, prompt in enumerate(prompts)]
  groups = []
  together = engine.prefill_together
  monkeypatch.setattr(engine, "prefill_together", lambda p, n: (groups.append(len(p)), together(p, n))[1])
  found = [row.ids for row in generate(engine, requests, stop_ids=(), clock=CompileClock())[0]]
  assert groups[:2] == [4, 1]
  monkeypatch.setattr(spmd_engine, "TOKENS_TOGETHER", 300)
  assert engine.rows_together(256) == 1
  groups.clear()
  assert [row.ids for row in generate(engine, requests, stop_ids=(), clock=CompileClock())[0]] == found
  assert set(groups) == {1}
  with pytest.raises(ValueError, match="2 prompts of 256 tokens together, expected 1 at most"):
    engine.prefill_together([np.zeros(256, np.int32)] * 2, [3, 4])


@pytest.mark.slow  # both engines; tests/kimi_k3/model_test.py and spmd/model_test.py decode golden cases by default
@pytest.mark.parametrize("settings", [(), ("partitioning=manual",)], ids=["auto", "manual"])
def test_rows_of_k3_are_the_same_alone_by_steps_and_in_turns(k3_tiny, convert, float32_config, monkeypatch, settings):
  """Rows of other lengths, seeds and ways beside them, another slot, another number of steps a call; traced once."""
  from kimi_k3.maxtext_adapter.engine import make_engine

  lengths = {"max_prefill_predict_length": 64, "max_target_length": 64 + 24, "per_device_batch_size": 3}
  engine = make_engine(float32_config(convert(k3_tiny.checkpoint, "--scan"), *settings, **lengths))
  ways = [SamplingOptions(), SamplingOptions(temperature=0.9, seed=5), SamplingOptions(temperature=1.2, top_p=0.9)]
  prompts = [list(k3_tiny.prompts[i % 3][: 1 + 9 * i]) for i in range(7)]
  requests = [Request(i, prompt, 3 + 3 * i, ways[i % 3]) for i, prompt in enumerate(prompts)]
  options = {"stop_ids": (254,), "clock": CompileClock(), "seed": 2}

  def run(some, **more):
    return [row.ids for row in generate(engine, some, **(options | more))[0]]

  expected = run(requests, steps_per_call=6)
  compiled = []
  monkeypatch.setattr(CompileClock, "_record", lambda _self, event, _duration, **_: compiled.append(event))
  options["clock"] = CompileClock()
  assert run(requests[::-1], steps_per_call=6) == expected[::-1]
  assert run([requests[i] for i in (3, 5)], steps_per_call=6) == [expected[i] for i in (3, 5)]
  assert compiled == [], "nothing is traced again as lengths and slots change"
  assert len({len(ids) for ids in expected}) > 3

  used = set()
  insert, release = engine.insert, engine.release
  monkeypatch.setattr(engine, "insert", lambda prompt, *slots: (insert(prompt, *slots), used.update(slots)))
  monkeypatch.setattr(engine, "release", lambda slot: (release(slot), used.discard(slot)))

  def by_steps(rows, plan, *, buffer):
    return decode_by_steps(engine.step, rows, [slot in used for slot in range(3)], plan, buffer=buffer)

  monkeypatch.setattr(engine, "decode", by_steps)
  assert run(requests[:4], steps_per_call=2) == expected[:4]
  assert not used


def test_an_engine_refuses_rows_that_are_not_of_its_slots():
  from kimi_k3.maxtext_adapter.engine import check_rows

  rows = rows_of(np.random.default_rng(1))
  used = [True, False, True, True, False]
  assert (check_rows(rows, used, VOCABULARY) == np.where(used, rows.limits - rows.counts, 0)).all()
  with pytest.raises(ValueError, match=r"rows of shape \(5,\): expected one number a slot, \[4\]"):
    check_rows(rows, used[:4], VOCABULARY)
  with pytest.raises(ValueError, match="outside the vocabulary of 13"):
    check_rows(rows._replace(tokens=np.array([13, 0, 0, 0, 0])), used, VOCABULARY)
  with pytest.raises(ValueError, match="slot 2: the row has all the tokens it may get"):
    check_rows(rows._replace(limits=np.where(np.arange(5) == 2, rows.counts, rows.limits)), used, VOCABULARY)
