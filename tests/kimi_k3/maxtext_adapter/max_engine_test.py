"""MaxEngine's own calls on our model: what they return, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

SLOTS, BUCKET, STEPS = 5, 8, 12

# MaxEngine offers a prompt's caches for reuse as the slots' caches, whose shapes differ.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


@pytest.fixture(scope="module")
def engine(k3_tiny, convert, float32_config) -> Any:
  from kimi_k3.maxtext_adapter.register import register_engine

  register_engine()
  from kimi_k3.maxtext_adapter.max_engine import KimiMaxEngine

  config = float32_config(
    convert(k3_tiny.checkpoint, "--scan"),
    max_prefill_predict_length=130,
    max_target_length=130 + STEPS,
    per_device_batch_size=SLOTS,
  )
  return KimiMaxEngine(config)


@pytest.fixture(scope="module")
def params(engine) -> Any:
  return engine.load_params()


@pytest.fixture
def state(engine, params) -> Any:
  del params  # the caches are placed once these are there
  return engine.init_decode_state()


def prompt(*tokens: int) -> dict[str, Any]:
  return {
    "padded_tokens": jnp.zeros(BUCKET, jnp.int32).at[: len(tokens)].set(jnp.array(tokens)),
    "true_length": len(tokens),
  }


def column(result: Any, name: str) -> list[int]:
  start, end = getattr(result, name)
  return np.asarray(result.data[:, start:end])[:, 0].tolist()


@pytest.mark.slow
def test_greedy_decoding_through_its_own_samples_equals_one_prompt_alone(engine, params, state):
  texts = {3: (5, 6, 7), 0: (9,), 4: (1, 2, 3, 4, 5)}
  for slot, text in texts.items():
    prefix, first = engine.prefill(params=params, **prompt(*text))
    assert column(first, "valid_idx") == [1]
    state = engine.insert(prefix, state, slot)
  rows = {slot: [] for slot in texts}
  for step in range(4):
    state, result = engine.generate(params, state)
    assert column(result, "valid_idx") == [1, 0, 0, 1, 1]
    assert [column(result, "length_idx")[slot] for slot in texts] == [step + 1] * 3
    for slot, ids in rows.items():
      ids.append(column(result, "tokens_idx")[slot])
  assert np.asarray(state["next_pos"])[[3, 0, 4], 0].tolist() == [3 + 4, 1 + 4, 5 + 4]
  assert (np.asarray(state["next_pos"])[[1, 2]] < 0).all()
  assert np.asarray(state["generated_tokens"])[:, 0].tolist() == [4, 0, 0, 4, 4]
  for slot, text in texts.items():
    prefix, _ = engine.prefill(params=params, **prompt(*text))
    alone, ids = engine.insert(prefix, engine.init_decode_state(), 1), []
    for _ in range(4):
      alone, result = engine.generate(params, alone)
      ids.append(column(result, "tokens_idx")[1])
    assert ids == rows[slot]


@pytest.mark.slow
def test_one_prompt_in_several_slots_each_with_its_own_first_token(engine, params, state):
  prefix, result = engine.prefill_multisampling(params=params, num_samples=3, algorithm="weighted", **prompt(5, 6, 7))
  first = column(result, "tokens_idx")
  assert column(result, "valid_idx") == [1, 1, 1]
  state = engine.bulk_insert(prefix, state, [4, 0, 2])
  assert np.asarray(state["tokens"])[:, 0].tolist() == [first[1], 0, first[2], 0, first[0]]
  state, _ = engine.generate(params, state)
  for slot, token in zip((4, 0, 2), first, strict=True):
    single, _ = engine.prefill(params=params, **prompt(5, 6, 7))
    alone = engine.insert(single, engine.init_decode_state(), 1)
    alone, _ = engine.generate(params, alone | {"tokens": jnp.full_like(alone["tokens"], token)})
    found, expected = np.asarray(state["logits"][slot]), np.asarray(alone["logits"][1])
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()  # see model_test.py


def test_one_first_token_serves_every_slot(engine, params, state):
  prefix, first = engine.prefill(params=params, **prompt(5, 6, 7))
  state = engine.bulk_insert(prefix, state, [1, 3])
  token = column(first, "tokens_idx")[0]
  assert np.asarray(state["tokens"])[:, 0].tolist() == [0, token, 0, token, 0]
  assert (np.asarray(state["next_pos"])[:, 0] >= 0).tolist() == [False, True, False, True, False]


def test_tokens_that_are_neither_one_nor_as_many_as_the_slots_are_refused(engine, params, state):
  prefix, _ = engine.prefill_multisampling(params=params, num_samples=3, algorithm="weighted", **prompt(5, 6, 7))
  with pytest.raises(ValueError, match="3 first tokens for 2 slots"):
    engine.bulk_insert(prefix, state, [0, 1])


def test_a_result_that_is_not_finite_is_not_valid(engine, params, state):
  embedding = params["token_embedder"]["embedding"]
  good = embedding[...]
  prefix, _ = engine.prefill(params=params, **prompt(1, 2))
  state = engine.insert(prefix, state, 2)
  try:
    embedding[...] = good.at[200].set(jnp.nan)
    _, first = engine.prefill(params=params, **prompt(200))
    assert column(first, "valid_idx") == [0]
    _, result = engine.generate(params, state | {"tokens": jnp.full_like(state["tokens"], 200)})
    assert column(result, "valid_idx") == [0] * SLOTS
  finally:
    embedding[...] = good


def test_a_row_that_outlives_its_cache_is_not_valid_any_more(engine, params, state):
  prefix, _ = engine.prefill(params=params, **prompt(1, 2))
  state, valid = engine.insert(prefix, state, 2), []
  for _ in range(STEPS + 2):
    state, result = engine.generate(params, state)
    valid.append(column(result, "valid_idx")[2])
  assert valid == [1] * STEPS + [0, 0]


def test_true_is_not_slot_1(engine, params, state):
  prefix, _ = engine.prefill(params=params, **prompt(1, 2))
  with pytest.raises(ValueError, match="slot True: expected whole numbers"):
    engine.insert(prefix, state, True)


@pytest.mark.parametrize("slot", [-1, SLOTS, 99])
def test_a_slot_that_does_not_exist_is_refused_as_it_would_be_clamped_onto_another_row(engine, params, state, slot):
  prefix, _ = engine.prefill(params=params, **prompt(1, 2))
  for call in (
    lambda: engine.insert(prefix, state, slot),
    lambda: engine.bulk_insert(prefix, state, [0, slot]),
    lambda: engine.release(state, slot),
  ):
    with pytest.raises(ValueError, match=f"slot {slot}: there are {SLOTS}"):
      call()
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "nothing was used up"


IGNORED = ("existing_prefix", "positions", "images", "audio_values")


@pytest.mark.parametrize(("name", "value"), [(name, jnp.zeros(BUCKET)) for name in IGNORED])
def test_what_prefill_would_ignore_is_refused_by_name(engine, params, name, value):
  with pytest.raises(NotImplementedError, match=f"prefill with {name} is not supported"):
    engine.prefill(params=params, **prompt(1, 2), **{name: value})


def test_prompts_packed_in_one_row_are_refused_as_they_would_share_a_state(engine):
  with pytest.raises(NotImplementedError, match=r"packed prefill \(prefill_concat\) is not supported"):
    engine.prefill_concat(params=None, padded_tokens=jnp.zeros(8, jnp.int32))
  with pytest.raises(NotImplementedError, match=r"packed prefill \(insert_partial\) is not supported"):
    engine.insert_partial(None, None, None, None, start_indices=None, num_prompts=2, seq_len=8)
