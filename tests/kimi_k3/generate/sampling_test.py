from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import softmax
from kimi_k3.errors import InputError
from kimi_k3.generate.sampling import GREEDY, WEIGHTED, Sampler

VOCABULARY = 8


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
  return np.random.default_rng(0).standard_normal((6, VOCABULARY)).astype(np.float32)


def draw(sampler, logits, rows, steps) -> list[int]:
  return np.asarray(sampler(jnp.asarray(logits), np.asarray(rows), np.asarray(steps))[0]).tolist()


def weighted(temperature: float = 1.0, seed: int = 0) -> Sampler:
  return Sampler(WEIGHTED, temperature, seed)


def test_greedy_takes_the_largest_logit_whatever_seed_and_temperature(logits):
  expected = logits.argmax(axis=-1).tolist()
  for temperature, seed in ((1.0, 0), (0.0, 7)):
    assert draw(Sampler(GREEDY, temperature, seed), logits, range(6), range(6)) == expected


def test_greedy_takes_the_first_of_equals():
  assert draw(Sampler(GREEDY, 1.0, 0), [[0.0, 2.0, 2.0, 1.0]], [0], [0]) == [1]


@pytest.mark.parametrize("sampler", [Sampler(GREEDY, 1.0, 0), weighted()])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_and_leaves_its_neighbours_alone(logits, sampler, bad):
  dirty = logits.copy()
  dirty[2, 5] = bad
  tokens, finite = sampler(jnp.asarray(dirty), np.arange(6), np.arange(6))
  np.testing.assert_array_equal(finite, [True, True, False, True, True, True])
  kept = [0, 1, 3, 4, 5]
  clean = draw(sampler, logits, range(6), range(6))
  assert [int(tokens[i]) for i in kept] == [clean[i] for i in kept]


def test_a_draw_does_not_depend_on_slot_or_neighbours(logits):
  rows, steps = np.array([3, 9, 4, 0, 7, 1]), np.array([5, 0, 2, 8, 1, 1])
  together = draw(weighted(), logits, rows, steps)
  order = [4, 2, 0, 5, 1, 3]
  assert draw(weighted(), logits[order], rows[order], steps[order]) == [together[i] for i in order]
  assert [draw(weighted(), logits[i : i + 1], rows[i : i + 1], steps[i : i + 1])[0] for i in range(6)] == together


def test_seed_row_and_step_each_change_the_draws():
  flat, many = np.zeros((64, VOCABULARY), np.float32), np.arange(64)
  first = draw(weighted(seed=0), flat, many, many * 0)
  assert draw(weighted(seed=0), flat, many, many * 0) == first
  assert draw(weighted(seed=1), flat, many, many * 0) != first
  assert draw(weighted(seed=0), flat, many, many * 0 + 1) != first
  assert draw(weighted(seed=0), flat, many + 64, many * 0) != first
  # Nor is a step of one row a step of another shifted by it.
  assert draw(weighted(seed=0), flat, many * 0, many) != first


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_at_the_temperature_says(temperature):
  count = 20_000
  logits = np.array([2.0, 1.0, 0.0, -1.0, -30.0], np.float32)
  tokens = draw(weighted(temperature), np.tile(logits, (count, 1)), np.arange(count), np.zeros(count, np.int32))
  found = np.bincount(tokens, minlength=5) / count
  expected = softmax(logits.astype(np.float64) / temperature)
  # Four standard deviations of a share of 20,000 draws; the seed is fixed.
  assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / count) + 1e-9).all()


def test_a_low_temperature_is_nearly_greedy(logits):
  assert draw(weighted(1e-3), logits, range(6), range(6)) == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_draw_at_no_temperature_is_refused(temperature):
  with pytest.raises(InputError, match=f"decode_sampling_temperature is {temperature}, expected a positive number"):
    Sampler(WEIGHTED, temperature, 0)


@pytest.mark.parametrize("strategy", ["nucleus", "topk", "composite", ""])
def test_a_strategy_that_does_not_exist_is_refused(strategy):
  with pytest.raises(InputError, match=f"decode_sampling_strategy is {strategy!r}, expected 'greedy' or 'weighted'"):
    Sampler(strategy, 1.0, 0)


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_that_would_be_another_one_is_refused(seed):
  with pytest.raises(InputError, match=f"decode_sampling_seed is {seed}, expected 0 to 4294967295"):
    weighted(seed=seed)


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-6])
def test_a_temperature_near_zero_draws_the_largest_logit(temperature):
  logits = np.array([[1.0, 2.5, 300.0, 299.5], [-5.0, -1.0, -3.0, -9.0]], np.float32)
  assert draw(weighted(temperature), logits, [0, 1], [0, 0]) == [2, 1]


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-40, float("nan"), float("inf")])
def test_a_temperature_that_float32_cannot_divide_by_is_refused(temperature):
  with pytest.raises(InputError, match=r"decode_sampling_temperature is .*, expected a positive number"):
    weighted(temperature)
