"""Choosing tokens: the largest logit, or a draw that depends on the row's seed and the number of the token alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.errors import InputError

GREEDY = "greedy"
STRATEGIES = (GREEDY, "weighted", "topk", "nucleus", "composite")  # MaxText's names
_TAKES_TOP_K = ("topk", "composite")
_TAKES_TOP_P = ("nucleus", "composite")
_SMALLEST = float(np.finfo(np.float32).tiny)  # XLA takes what is below for 0
_LARGEST = float(np.finfo(np.float32).max)
_NUM_SEEDS = 2**32  # JAX drops the bits above: two seeds would give the same draws
_LARGEST_TOP_K = 2**31 - 1
_INFINITY_BITS = 0x7F800000  # of float32


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
  """How the tokens of one row are chosen.

  Attributes:
    temperature: Divides the logits; 0: the largest logit is taken, the first of equals.
    top_k: A draw is from the tokens with the k largest logits, and from all that equal the last of them; 0: from all.
    top_p: A draw is from the fewest most likely of these whose probabilities sum to p, and all that equal the last.
    seed: Of the row's draws: equal seeds and logits give equal tokens. None: the run's seed and the row's number.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int | None = None

  def __post_init__(self) -> None:
    if self.temperature != 0 and not _SMALLEST <= self.temperature <= _LARGEST:
      raise InputError(
        f"temperature is {self.temperature}, expected 0 (greedy) or a positive number "
        f"({_SMALLEST:.1e} to {_LARGEST:.1e}, as float32 has them)"
      )
    if not 0 <= self.top_k <= _LARGEST_TOP_K:
      raise InputError(f"top_k is {self.top_k}, expected 0 (all tokens) or more")
    if not _SMALLEST <= self.top_p <= 1:
      raise InputError(
        f"top_p is {self.top_p}, expected more than 0 ({_SMALLEST:.1e}, as float32 has it) and at most 1 (all tokens)"
      )
    if self.seed is not None:
      check_seed("seed", self.seed)


def check_seed(name: str, seed: int) -> None:
  """Raises InputError for a seed that would be another one."""
  if not 0 <= seed < _NUM_SEEDS:
    raise InputError(f"{name} is {seed}, expected 0 to {_NUM_SEEDS - 1}")


def sampling_of(strategy: str, temperature: float, top_k: int, top_p: float) -> SamplingOptions:
  """Returns the options that MaxText's decode_sampling_* settings name. Where not wanted, top_k is 0 and top_p -1.

  Raises:
    InputError: for an unknown strategy, a value out of range, or one that the strategy would ignore.
  """
  if strategy not in STRATEGIES:
    raise InputError(f"decode_sampling_strategy is {strategy!r}, expected one of: {', '.join(STRATEGIES)}")
  for name, value, unset, takers in (
    ("decode_sampling_top_k", top_k, 0, _TAKES_TOP_K),
    ("decode_sampling_nucleus_p", top_p, -1, _TAKES_TOP_P),
  ):
    if strategy not in takers and value != unset:
      raise InputError(f"{name} is {value}, which decode_sampling_strategy {strategy} ignores: use {takers[0]}")
    if strategy in takers and value == unset:
      raise InputError(f"decode_sampling_strategy is {strategy}: set {name}")
  if strategy == GREEDY:
    return SamplingOptions()
  if temperature == 0:
    raise InputError(
      f"decode_sampling_temperature is {temperature}, expected a positive number: greedy takes the largest logit"
    )
  try:
    return SamplingOptions(
      temperature, top_k if strategy in _TAKES_TOP_K else 0, top_p if strategy in _TAKES_TOP_P else 1.0
    )
  except InputError as error:
    raise InputError(f"decode_sampling: {error}") from None


class Draws(NamedTuple):
  """How each row chooses, as arrays [B].

  Attributes:
    seeds: uint32.
    numbers: uint32; with the seed they name the row.
    temperature: float32, 0 for greedy.
    top_k: int32, 0 for all.
    top_p: float32, 1 for all.
  """

  seeds: Any
  numbers: Any
  temperature: Any
  top_k: Any
  top_p: Any

  @classmethod
  def of(cls, options: Sequence[SamplingOptions], indices: Sequence[int], seed: int) -> Draws:
    """Returns those of rows with these numbers in a run with this seed."""
    return cls(
      np.array([seed if o.seed is None else o.seed for o in options], np.uint32),
      np.array([i if o.seed is None else 0 for o, i in zip(options, indices, strict=True)], np.uint32),
      np.array([o.temperature for o in options], np.float32),
      np.array([o.top_k for o in options], np.int32),
      np.array([o.top_p for o in options], np.float32),
    )


def sample(
  logits: Float[Array, "B X"], draws: Draws, counts: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
  """Returns a token for each row, and whether the row's logits were finite: if not, the token means nothing.

  Nothing in a row depends on another. Use under jit, with whole rows on a device: what a draw gives hangs on the last
  bits of sums over the vocabulary.

  Args:
    logits: Of the next tokens.
    draws: How each row chooses.
    counts: New tokens the row has: the number of this one.
  """
  finite = jnp.isfinite(logits).all(axis=-1)
  greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  tokens = jax.lax.cond((draws.temperature > 0).any(), _drawn, lambda *_: greedy, logits, draws, counts)
  return jnp.where(draws.temperature > 0, tokens, greedy), finite


def sample_everywhere(logits: Float[Array, "B X"], draws: Draws, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns what `sample` does, on the host of every process. Compiled once for each shape."""
  sharding = logits.sharding if isinstance(logits, jax.Array) else None
  whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
  # As numpy's arrays: those of one device cannot be joined with logits of several processes.
  tokens, finite = _sampling(whole)(logits, draws, np.asarray(counts, np.int32))
  return np.asarray(tokens), np.asarray(finite)


@functools.cache
def _sampling(whole: NamedSharding | None) -> Callable[..., tuple[Array, Array]]:
  def everywhere(logits, draws, counts):
    if whole is not None:
      logits = jax.lax.with_sharding_constraint(logits, whole)
    return sample(logits, draws, counts)

  return jax.jit(everywhere, out_shardings=whole)


def _drawn(logits: Float[Array, "B X"], draws: Draws, counts: Int[Array, " B"]) -> Int[Array, " B"]:
  logits = logits.astype(jnp.float32)
  temperature = jnp.where(draws.temperature > 0, draws.temperature, 1)[:, None]
  # A quotient that overflows is infinite and never drawn.
  below = (jnp.max(logits, axis=-1, keepdims=True) - logits) / temperature
  narrowed = (draws.top_k > 0) | (draws.top_p < 1)
  kept = jax.lax.cond(narrowed.any(), _kept, lambda below, _: jnp.ones(below.shape, bool), below, draws)

  def draw(seed, number, count, scores):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), count)
    return jax.random.categorical(key, scores)

  scores = jnp.where(kept, -below, -jnp.inf)
  return jax.vmap(draw)(draws.seeds, draws.numbers, counts, scores).astype(jnp.int32)


def _kept(below: Float[Array, "B X"], draws: Draws) -> Bool[Array, "B X"]:
  """Which tokens a row may draw. Thresholds are found by halving the range of float32: no sort of the vocabulary."""
  wanted = jnp.where(draws.top_k > 0, draws.top_k, below.shape[-1])
  kept = below <= _threshold(below, jnp.ones_like(below), jnp.minimum(wanted, below.shape[-1]).astype(jnp.float32))
  weights = jnp.where(kept, jnp.exp(-below), 0)
  mass = jnp.where(draws.top_p < 1, draws.top_p * weights.sum(axis=-1), jnp.inf)  # infinite: never reached, all kept
  return kept & (below <= _threshold(below, weights, mass))


def _threshold(
  below: Float[Array, "B X"], weights: Float[Array, "B X"], wanted: Float[Array, " B"]
) -> Float[Array, "B 1"]:
  """Returns the least t for which the weights of all entries up to t sum to what is wanted, infinity if none does.

  The bits of a float32 that is not negative order as the number does. Counts are exact: below 2**24 entries.
  """

  def halve(_, interval):
    low, high = interval  # the answer is above low and at most high
    middle = low + (high - low) // 2
    up_to = jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None]
    enough = jnp.where(below <= up_to, weights, 0).sum(axis=-1) >= wanted
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  low = jnp.full(wanted.shape, -1, jnp.int32)
  high = jnp.full(wanted.shape, _INFINITY_BITS, jnp.int32)
  _, found = jax.lax.fori_loop(0, 32, halve, (low, high))
  return jax.lax.bitcast_convert_type(found, jnp.float32)[:, None]
