"""KDA's cases: one batch row a decay regime, and the float64 recurrence of the numpy reference over it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import delta_rule, l2_norm, sigmoid

# Around the edges of tokens, sub-chunks of 16 and chunks of 64.
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 129, 200)
HEADS, KEY_DIM, VALUE_DIM = 3, 32, 48  # unequal widths: a transposed state cannot hide
RATES = np.array([1.0, 4.0, 16.0])  # exp(A_log); released checkpoints are initialised from 1 to 16
REGIMES = ("floor", "bounded", "softplus", "brutal", "correlated", "none", "weak", "mixed")


@dataclasses.dataclass(frozen=True)
class Truth:
  """Inputs of a KDA call, float32, one row of the batch for each of REGIMES, and what they give in float64.

  Attributes:
    inputs: q, k, v, g, beta over max(LENGTHS) tokens.
    state: The state before them, not zero.
    o: Outputs; those of a shorter call are a prefix of them.
    states: The state after each of LENGTHS tokens.
  """

  inputs: tuple[jnp.ndarray, ...]
  state: jnp.ndarray
  o: np.ndarray
  states: dict[int, np.ndarray]

  def tokens(self, start: int, stop: int) -> tuple[jnp.ndarray, ...]:
    return tuple(x[:, start:stop] for x in self.inputs)


def log_decays(rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
  """Log decays [T, H, K] of each regime."""
  shape = (length, HEADS, KEY_DIM)
  a, dt_bias = rng.standard_normal(shape), rng.uniform(-6.5, -2.0, shape[1:])
  rates = RATES[:, None]
  return {
    "floor": np.full(shape, -5.0),
    "bounded": -5.0 * sigmoid(rates * (a + dt_bias)),
    "softplus": -rates * np.logaddexp(0.0, a + dt_bias),
    "brutal": -16.0 * np.logaddexp(0.0, a + 5.0),
    "correlated": np.full(shape, -1e-4),
    "none": np.zeros(shape),
    "weak": rng.uniform(-2e-3, 0.0, shape),
    # A channel forgets everything, then nothing for a while: a difference of running sums would have lost its digits.
    "mixed": np.where(rng.random(shape) < 0.1, -100.0, -0.01 * rng.random(shape)),
  }


@pytest.fixture(scope="session")
def truth() -> Truth:
  rng = np.random.default_rng(0)
  length = max(LENGTHS)
  shape = (len(REGIMES), length, HEADS)
  q, k = rng.standard_normal((2, *shape, KEY_DIM))
  beta = sigmoid(rng.standard_normal(shape))
  alike = REGIMES.index("correlated")
  k[alike] = rng.standard_normal((1, HEADS, KEY_DIM)) + 0.02 * k[alike]
  beta[alike] = 1.0 - 0.01 * rng.random(shape[1:])
  g = np.stack([log_decays(rng, length)[name] for name in REGIMES])
  v, state = rng.standard_normal((*shape, VALUE_DIM)), rng.standard_normal((len(REGIMES), HEADS, KEY_DIM, VALUE_DIM))
  inputs = tuple(jnp.asarray(x, jnp.float32) for x in (l2_norm(q), l2_norm(k), v, g, beta))
  state = jnp.asarray(state, jnp.float32)
  o, states, start, exact = [], {}, 0, np.asarray(state, np.float64)
  for stop in LENGTHS:
    part, exact = delta_rule(*(np.asarray(x[:, start:stop], np.float64) for x in inputs), exact)
    o.append(part)
    states[stop], start = exact, stop
  return Truth(inputs, state, np.concatenate(o, axis=1), states)


@pytest.fixture(scope="session")
def assert_rows_close():
  """A check of arrays whose error may be `tolerance` times the largest value of a row, in each row."""

  def check(found, expected, tolerance: float, rows=REGIMES) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    found, expected = (x.reshape(len(x), -1).astype(np.float64) for x in (found, expected))
    errors = np.abs(found - expected).max(axis=1) / np.maximum(np.abs(expected).max(axis=1), 1e-30)
    faults = {row: float(e) for row, e in zip(rows, errors, strict=True) if not e <= tolerance}
    assert not faults, f"relative errors above {tolerance}: {faults}"

  return check
