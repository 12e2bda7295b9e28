"""Choosing tokens: the largest logit, or a draw that depends on the seed, the row and the step alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kimi_k3.errors import InputError

GREEDY = "greedy"
WEIGHTED = "weighted"
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_NUM_SEEDS = 2**32  # JAX drops the bits above: two seeds would give the same draws


@dataclasses.dataclass(frozen=True)
class Sampler:
  """How tokens are drawn.

  Attributes:
    strategy: "greedy", or "weighted" by the softmax at a temperature. MaxText's names.
    temperature: Divides the logits.
    seed: A row's draws depend on this, its number and the step, not on its slot or its neighbours.
  """

  strategy: str
  temperature: float
  seed: int

  def __post_init__(self) -> None:
    if self.strategy not in (GREEDY, WEIGHTED):
      raise InputError(f"decode_sampling_strategy is {self.strategy!r}, expected {GREEDY!r} or {WEIGHTED!r}")
    if not 0 <= self.seed < _NUM_SEEDS:
      raise InputError(f"decode_sampling_seed is {self.seed}, expected 0 to {_NUM_SEEDS - 1}")
    if self.strategy == WEIGHTED and not _SMALLEST_TEMPERATURE <= self.temperature < np.inf:
      raise InputError(
        f"decode_sampling_temperature is {self.temperature}, expected a positive number "
        f"(float32 knows none below {_SMALLEST_TEMPERATURE:.1e})"
      )

  def __call__(
    self, logits: Float[Array, "B X"], rows: Int[Array | np.ndarray, " B"], steps: Int[Array | np.ndarray, " B"]
  ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Returns a token for each row, and whether the row's logits were finite: if not, the token means nothing."""
    # As numpy's arrays: those of one device cannot be joined with logits of several processes.
    return _sampling(_everywhere(logits))(self, logits, np.asarray(rows, np.int32), np.asarray(steps, np.int32))


def _everywhere(logits: Array) -> NamedSharding | None:
  """Where the tokens go: to all devices of the logits' mesh, so that every process can read them."""
  sharding = logits.sharding if isinstance(logits, jax.Array) else None
  return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@functools.cache
def _sampling(result: NamedSharding | None) -> Callable[..., tuple[Array, Array]]:
  return jax.jit(_sample, static_argnums=0, out_shardings=result)


def _sample(sampler: Sampler, logits, rows, steps):
  finite = jnp.isfinite(logits).all(axis=-1)
  if sampler.strategy == GREEDY:
    return jnp.argmax(logits, axis=-1), finite

  def draw(row_logits, row, step):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(sampler.seed), row), step)
    below_largest = row_logits.astype(jnp.float32) - jnp.max(row_logits)  # a quotient that overflows is -inf, never inf
    return jax.random.categorical(key, below_largest / sampler.temperature)

  return jax.vmap(draw)(logits, rows, steps), finite
