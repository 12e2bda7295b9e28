import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import delta_rule, l2_norm
from kimi_k3.kda.chunked import kda_chunked
from kimi_k3.kda.reference import kda_recurrence, kda_step

pytestmark = pytest.mark.strict_ranks

# float32 rounds by 6e-8; a sum over the 64 tokens and 32 channels of a chunk, by a few times that. (Accepted: 1e-4.)
TOLERANCE = 2e-6
STEPS_TOLERANCE = 65 * 6e-8  # a step rounds the whole state: the roundings of all add up
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 129, 200)
# All ways to cut a length of the list into two of the list.
SPLITS = [(a, b) for a in LENGTHS for b in LENGTHS if a + b in LENGTHS]

_chunked = jax.jit(kda_chunked, static_argnames=("chunk", "sub_chunk"))
_step = jax.jit(kda_step)


def test_splits_cover_sub_chunk_and_chunk_edges():
  assert {(1, 1), (1, 16), (16, 1), (15, 2), (1, 64), (64, 1), (63, 2), (64, 65), (2, 127)} <= set(SPLITS)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunked_equals_recurrence_at_any_length(truth, assert_rows_close, length):
  o, state = _chunked(*truth.tokens(0, length), truth.state)
  assert_rows_close(o, truth.o[:, :length], TOLERANCE)
  assert_rows_close(state, truth.states[length], TOLERANCE)


@pytest.mark.parametrize(("first", "second"), SPLITS)
def test_prefill_in_two_parts_equals_the_whole(truth, assert_rows_close, first, second):
  o0, state = _chunked(*truth.tokens(0, first), truth.state)
  o1, state = _chunked(*truth.tokens(first, first + second), state)
  assert_rows_close(jnp.concatenate([o0, o1], axis=1), truth.o[:, : first + second], TOLERANCE)
  assert_rows_close(state, truth.states[first + second], TOLERANCE)


@pytest.mark.parametrize("prefill", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64])
def test_prefill_then_steps_equals_the_whole(truth, assert_rows_close, prefill):
  outputs, state = _chunked(*truth.tokens(0, prefill), truth.state)
  outputs = [outputs]
  for t in range(prefill, 65):
    o, state = _step(*(x[:, t] for x in truth.inputs), state)
    outputs.append(o[:, None])
  assert_rows_close(jnp.concatenate(outputs, axis=1), truth.o[:, :65], STEPS_TOLERANCE)
  assert_rows_close(state, truth.states[65], STEPS_TOLERANCE)


@pytest.mark.parametrize(("chunk", "sub_chunk"), [(64, 8), (128, 32), (36, 12)])
def test_choice_of_chunk_and_sub_chunk_does_not_matter(truth, assert_rows_close, chunk, sub_chunk):
  o, state = _chunked(*truth.tokens(0, 129), truth.state, chunk=chunk, sub_chunk=sub_chunk)
  assert_rows_close(o, truth.o[:, :129], TOLERANCE)
  assert_rows_close(state, truth.states[129], TOLERANCE)


def test_chunk_that_is_no_multiple_of_the_sub_chunk_is_refused(truth):
  with pytest.raises(ValueError, match="chunk is 64, expected a multiple of sub_chunk = 48"):
    kda_chunked(*truth.tokens(0, 5), truth.state, sub_chunk=48)


def test_released_head_width_at_the_decay_floor_equals_recurrence(assert_rows_close):
  rng, heads, width, length = np.random.default_rng(0), 2, 128, 200
  q, k = l2_norm(rng.standard_normal((2, 1, length, heads, width)))
  v, beta, g = rng.standard_normal(q.shape), rng.random(q.shape[:3]), np.full(q.shape, -5.0)
  inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta, rng.standard_normal((1, heads, width, width)))]
  expected = delta_rule(*(np.asarray(x, np.float64) for x in inputs))
  for found, exact in zip(_chunked(*inputs), expected, strict=True):
    assert_rows_close(found, exact, TOLERANCE, rows=("floor",))


# Starts in each row: none, at the first token, at chunk and sub-chunk edges, at neighbours, at the last token.
STARTS = [[], [0], [64], [16, 48, 64, 112], [1, 2, 3, 4], [50], [128], [0, 63, 65, 100, 127]]


def packed_resets(length=129):
  return jnp.asarray(np.stack([np.isin(np.arange(length), row) for row in STARTS]))


def test_packed_documents_equal_separate_ones(truth, assert_rows_close):
  o, state = _chunked(*truth.tokens(0, 129), truth.state, resets=packed_resets())
  expected, after = np.empty(o.shape), []
  for row, starts in enumerate(STARTS):
    state_row = np.asarray(truth.state[row : row + 1], np.float64)
    bounds = [0, *starts, 129]
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
      inputs = (np.asarray(x[row : row + 1, start:stop], np.float64) for x in truth.inputs)
      part, state_row = delta_rule(*inputs, state_row if i == 0 else 0 * state_row)
      expected[row, start:stop] = part[0]
    after.append(state_row[0])
  assert_rows_close(o, expected, TOLERANCE)
  assert_rows_close(state, np.stack(after), TOLERANCE)


def test_tokens_without_decay_and_learning_leave_the_state_alone(truth, assert_rows_close):
  q, k, v, g, beta = truth.tokens(0, 65)
  o, state = _chunked(q, k, v, 0 * g, 0 * beta, truth.state)
  np.testing.assert_array_equal(state, truth.state)
  real = jnp.arange(65)[None, :, None] < 17
  g, beta = jnp.where(real[..., None], g, 0), jnp.where(real, beta, 0)
  o, state = _chunked(q, k, v, g, beta, truth.state)
  assert_rows_close(o[:, :17], truth.o[:, :17], TOLERANCE)
  assert_rows_close(state, truth.states[17], TOLERANCE)


def test_gradients_are_finite_and_equal_the_recurrences(truth, assert_rows_close):
  length = 129
  rng = np.random.default_rng(1)
  weights_o = jnp.asarray(rng.standard_normal(truth.o[:, :length].shape), jnp.float32)
  weights_state = jnp.asarray(rng.standard_normal(truth.state.shape), jnp.float32)

  def loss(kda, *args):
    o, state = kda(*args[:-1], resets=args[-1])
    return jnp.sum(o * weights_o) + jnp.sum(state * weights_state)

  chunked, recurrence = (
    jax.jit(jax.grad(functools.partial(loss, kda), argnums=range(6))) for kda in (kda_chunked, kda_recurrence)
  )
  for resets in (jnp.zeros_like(packed_resets()), packed_resets()):
    args = (*truth.tokens(0, length), truth.state, resets)
    for found, expected in zip(chunked(*args), recurrence(*args), strict=True):
      assert np.all(np.isfinite(found))
      # The recurrence is in float32 too, and rounds at each of its steps, forward and back.
      assert_rows_close(found, expected, 2 * length * 6e-8)


def test_low_precision_inputs_are_computed_in_float32(truth):
  low = [x.astype(jnp.bfloat16) for x in (*truth.tokens(0, 17), truth.state)]
  for found, expected in zip(_chunked(*low), _chunked(*(x.astype(jnp.float32) for x in low)), strict=True):
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)  # the same operations, perhaps fused otherwise


def test_compiled_form_loops_over_chunks_and_never_over_tokens(truth):
  args = [jnp.concatenate([x, x], axis=1)[:, :256] for x in truth.inputs]
  text = jax.jit(kda_chunked).lower(*args, truth.state).compile().as_text()
  loops = len(re.findall(r" while\(%", text))
  trips = [int(n) for n in re.findall(r'known_trip_count"?:\s*\{"n":"(\d+)"', text)]
  assert trips == [4]
  assert loops == len(trips)
