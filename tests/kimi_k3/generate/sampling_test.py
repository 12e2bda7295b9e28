from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import softmax
from kimi_k3.errors import InputError
from kimi_k3.generate.sampling import Draws, SamplingOptions, _kept, sample, sample_everywhere, sampling_of

ROWS, VOCABULARY = 6, 8
MANY = 20_000


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
  return np.random.default_rng(0).standard_normal((ROWS, VOCABULARY)).astype(np.float32)


def draw(options, logits, rows, counts, seed: int = 0) -> list[int]:
  options = options if isinstance(options, list) else [options] * len(logits)
  return sample_everywhere(jnp.asarray(logits), Draws.of(options, [int(i) for i in rows], seed), np.asarray(counts))[
    0
  ].tolist()


def warm(temperature: float = 1.0, **others) -> SamplingOptions:
  return SamplingOptions(temperature=temperature, **others)


def test_greedy_takes_the_largest_logit_whatever_the_seed(logits):
  expected = logits.argmax(axis=-1).tolist()
  for seed in (0, 7):
    assert draw(SamplingOptions(), logits, range(ROWS), range(ROWS), seed) == expected


def test_greedy_takes_the_first_of_equals(logits):
  tied = np.array(logits)
  tied[:, [2, 5]] = 9
  assert draw(SamplingOptions(), tied, range(ROWS), range(ROWS)) == [2] * ROWS


@pytest.mark.parametrize("options", [SamplingOptions(), warm(), warm(top_k=3, top_p=0.9)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_and_leaves_its_neighbours_alone(logits, options, bad):
  dirty = logits.copy()
  dirty[2, 5] = bad
  draws = Draws.of([options] * ROWS, range(ROWS), 0)
  tokens, finite = sample_everywhere(jnp.asarray(dirty), draws, np.arange(ROWS))
  np.testing.assert_array_equal(finite, [True, True, False, True, True, True])
  kept = [0, 1, 3, 4, 5]
  clean = draw(options, logits, range(ROWS), range(ROWS))
  assert [int(tokens[i]) for i in kept] == [clean[i] for i in kept]


def test_a_draw_does_not_depend_on_slot_or_neighbours(logits):
  rows, counts = np.array([3, 9, 4, 0, 7, 1]), np.array([5, 0, 2, 8, 1, 1])
  ways = [warm(), SamplingOptions(), warm(0.7, top_k=3), warm(top_p=0.8), warm(seed=5), warm(2.0, top_k=4, top_p=0.9)]
  together = draw(ways, logits, rows, counts)
  for order in ([4, 2, 0, 5, 1, 3], [5, 4, 3, 2, 1, 0]):
    found = draw([ways[i] for i in order], logits[order], rows[order], counts[order])
    assert found == [together[i] for i in order]
  # Beside rows that are greedy the draw is the same too.
  for i in range(ROWS):
    alone = [ways[i] if j == i else SamplingOptions() for j in range(ROWS)]
    assert draw(alone, logits, rows, counts)[i] == together[i]


def test_seed_row_and_count_each_change_the_draws():
  flat, many = np.zeros((64, VOCABULARY), np.float32), np.arange(64)
  first = draw(warm(), flat, many, many * 0)
  assert draw(warm(), flat, many, many * 0) == first
  assert draw(warm(), flat, many, many * 0, seed=1) != first
  assert draw(warm(), flat, many, many * 0 + 1) != first
  assert draw(warm(), flat, many + 64, many * 0) != first
  # Nor is a step of one row a step of another shifted by it.
  assert draw(warm(), flat, many * 0, many) != first
  # A row's own seed: whatever its number.
  assert len(set(draw(warm(seed=3), flat, many, many * 0))) == 1


@pytest.mark.parametrize(
  "options", [warm(0.5), warm(1.0), warm(2.0), warm(top_k=2), warm(top_p=0.7), warm(2.0, top_k=3, top_p=0.78)]
)
def test_tokens_come_as_often_as_the_softmax_of_what_is_kept_says(options):
  logits = np.array([2.0, 1.0, 0.0, -1.0, -30.0], np.float32)
  tokens = draw(options, np.tile(logits, (MANY, 1)), np.arange(MANY), np.zeros(MANY, np.int32))
  found = np.bincount(tokens, minlength=5) / MANY
  expected = probabilities(logits.astype(np.float64), options)
  # Four standard deviations of a share of 20,000 draws; the seed is fixed.
  assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / MANY) + 1e-9).all()


def probabilities(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
  """By sorting: the definition."""
  scaled = logits / options.temperature
  if options.top_k:
    scaled = np.where(scaled >= np.sort(scaled)[-min(options.top_k, len(scaled))], scaled, -np.inf)
  p = softmax(scaled)
  order = np.argsort(-p, kind="stable")
  needed = 1 + np.searchsorted(np.cumsum(p[order]), options.top_p) if options.top_p < 1 else len(p)
  p = np.where(p >= p[order[min(needed, len(p)) - 1]], p, 0)
  return p / p.sum()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_what_sorting_keeps(seed):
  """At K3's vocabulary too, and with ties, which are kept together."""
  rng = np.random.default_rng(seed)
  size = (257, 1000, 163_840, 5)[seed]
  logits = (3 * rng.standard_normal((8, size))).astype(np.float32)
  logits[1] = np.round(logits[1])
  logits[2] = 0
  temperatures = (1.0, 0.3, 1.0, 2.0, 1.0, 0.1, 5.0, 1.0)
  top_ks, top_ps = (0, 7, 3, 1, 40, 0, 10**9, size), (0.9, 1.0, 0.5, 1.0, 0.95, 0.01, 0.999, 0.5)
  ways = [warm(t, top_k=k, top_p=p) for t, k, p in zip(temperatures, top_ks, top_ps, strict=True)]
  draws = Draws.of(ways, range(8), 0)
  below = (logits.max(axis=-1, keepdims=True) - logits) / draws.temperature[:, None]
  kept = np.asarray(jax.jit(_kept)(below, draws))
  for row, way in enumerate(ways):
    expected = probabilities(logits[row].astype(np.float64), way) > 0
    # The last one of a nucleus may hang on float32 sums: it may differ where the mass up to it is p to within 1e-4.
    if not np.array_equal(kept[row], expected):
      p = softmax(logits[row].astype(np.float64) / way.temperature)
      assert kept[row].sum() != 0
      assert abs(p[kept[row]].sum() - p[expected].sum()) <= 1e-4, (row, way)
      assert way.top_p < 1


def test_top_k_of_one_and_a_tiny_nucleus_are_greedy(logits):
  expected = logits.argmax(axis=-1).tolist()
  ways = [warm(5.0, top_k=1), warm(5.0, top_p=1e-6), warm(5.0, top_p=float(np.finfo(np.float32).tiny))] * 2
  for seed in range(5):
    assert draw(ways, logits, range(ROWS), range(ROWS), seed) == expected


def test_a_low_temperature_is_nearly_greedy(logits):
  assert draw(warm(1e-3), logits, range(ROWS), range(ROWS)) == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-6])
def test_a_temperature_near_zero_draws_the_largest_logit(temperature):
  large = np.array([[1.0, 2.5, 300.0, 299.5, 0, 0, 0, 0], [-5.0, -1.0, -3.0, -9.0, -6, -6, -6, -6]] * 3, np.float32)
  assert draw(warm(temperature, top_p=0.9), large, range(ROWS), [0] * ROWS) == [2, 1] * 3


@pytest.mark.parametrize(
  ("options", "said"),
  [
    *[({"temperature": t}, re.escape(f"temperature is {t}, expected 0 (greedy) or a positive number"))
      for t in (-1.0, 1e-40, 1e39, float("nan"), float("inf"))],
    ({"top_k": -1}, "top_k is -1, expected 0"),
    *[({"top_p": p}, f"top_p is {p}, expected more than 0") for p in (0.0, -0.5, 1.5, 1e-40, 1e-300, float("nan"))],
    *[({"seed": s}, f"seed is {s}, expected 0 to 4294967295") for s in (-1, 2**32, 10**30)],
  ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options, said):
  with pytest.raises(InputError, match=said):
    SamplingOptions(**options)


def test_the_settings_of_maxtext_name_the_options():
  assert sampling_of("greedy", 1.0, 0, -1.0) == SamplingOptions()
  assert sampling_of("weighted", 0.7, 0, -1.0) == warm(0.7)
  assert sampling_of("topk", 0.7, 5, -1.0) == warm(0.7, top_k=5)
  assert sampling_of("nucleus", 0.7, 0, 0.9) == warm(0.7, top_p=0.9)
  assert sampling_of("composite", 0.7, 5, 0.9) == warm(0.7, top_k=5, top_p=0.9)


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    (("beam", 1.0, 0, -1.0), "'beam', expected one of: greedy, weighted, topk, nucleus, composite"),
    (("weighted", 0.0, 0, -1.0), "decode_sampling_temperature is 0.0, expected a positive number"),
    (("weighted", -1.0, 0, -1.0), "decode_sampling: temperature is -1.0, expected"),
    (("weighted", 1.0, 5, -1.0), "decode_sampling_top_k is 5, which decode_sampling_strategy weighted ignores"),
    (("greedy", 1.0, 0, 0.9), "decode_sampling_nucleus_p is 0.9, which decode_sampling_strategy greedy ignores"),
    (("topk", 1.0, 0, -1.0), "decode_sampling_strategy is topk: set decode_sampling_top_k"),
    (("nucleus", 1.0, 0, 2.0), "decode_sampling: top_p is 2.0, expected more than 0"),
    (("composite", 1.0, 4, -1.0), "decode_sampling_strategy is composite: set decode_sampling_nucleus_p"),
  ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, said):
  with pytest.raises(InputError, match=said):
    sampling_of(*settings)


def test_nothing_of_the_options_is_compiled_in():
  jitted = jax.jit(sample)
  for (temperature, k), seed in itertools.product(((0.0, 0), (1.0, 3)), (1, 2)):
    options = SamplingOptions(temperature=temperature, top_k=k, seed=seed)
    jitted(jnp.zeros((2, 4)), Draws.of([options] * 2, [0, 1], 0), np.array([0, 1]))
  assert jitted._cache_size() == 1
