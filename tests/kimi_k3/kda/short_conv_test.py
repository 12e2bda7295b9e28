import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from k3_reference import causal_conv
from kimi_k3.kda.short_conv import short_conv

pytestmark = pytest.mark.strict_ranks

BATCH, LENGTH, CHANNELS, WIDTH = 3, 11, 5, 4
# Sums of 4 products, each rounded once: a few units of 6e-8.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def case():
  rng = np.random.default_rng(0)
  shapes = (BATCH, LENGTH, CHANNELS), (WIDTH, CHANNELS), (BATCH, WIDTH - 1, CHANNELS)
  return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def float64_conv(x, taps, history):
  return causal_conv(*(np.asarray(a, np.float64) for a in (x, taps.T, history)))


def assert_near(found, expected):
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(initial=1.0))


def test_last_tap_multiplies_the_current_token():
  x = jnp.array([1.0, 2.0, 3.0])[None, :, None]
  taps = jnp.array([1000.0, 100.0, 10.0, 1.0])[:, None]
  history = jnp.array([7.0, 8.0, 9.0])[None, :, None]
  y, new_history = short_conv(x, taps, history)
  np.testing.assert_array_equal(y[0, :, 0], [7891.0, 8912.0, 9123.0])
  np.testing.assert_array_equal(new_history[0, :, 0], [1.0, 2.0, 3.0])


def test_convolution_is_the_references(case):
  x, taps, history = case
  y, new_history = short_conv(x, taps, history)
  expected, expected_history = float64_conv(x, taps, history)
  assert_near(y, expected)
  np.testing.assert_array_equal(new_history, expected_history.astype(np.float32))


def test_no_history_is_a_history_of_zeros(case):
  x, taps, history = case
  for found, expected in zip(short_conv(x, taps, None), short_conv(x, taps, jnp.zeros_like(history)), strict=True):
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("width", [2, 4])
def test_split_at_any_place_equals_the_whole(case, width):
  x, _, _ = case
  taps = jnp.asarray(np.random.default_rng(1).standard_normal((width, CHANNELS)), jnp.float32)
  whole, last = short_conv(x, taps, None)
  for cut in (1, 2, 3, 10):
    y0, history = short_conv(x[:, :cut], taps, None)
    y1, history = short_conv(x[:, cut:], taps, history)
    np.testing.assert_array_equal(jnp.concatenate([y0, y1], axis=1), whole)
    np.testing.assert_array_equal(history, last)


@pytest.mark.parametrize("tail", [1, 2, 3])
def test_a_tail_shorter_than_the_history_equals_the_whole_padded_or_not(case, tail):
  x, taps, _ = case
  whole, last = short_conv(x, taps, None)
  cut = LENGTH - tail
  _, history = short_conv(x[:, :cut], taps, None)
  padded = jnp.concatenate([x[:, cut:], jnp.full_like(x[:, :4], jnp.nan)], axis=1)
  valid = jnp.broadcast_to(jnp.arange(tail + 4)[None] < tail, padded.shape[:2])
  for y, new_history in (short_conv(x[:, cut:], taps, history), short_conv(padded, taps, history, valid=valid)):
    np.testing.assert_array_equal(y[:, :tail], whole[:, cut:])
    np.testing.assert_array_equal(new_history, last)


@pytest.mark.parametrize("history", ["none", "zeros"])
@pytest.mark.parametrize("left", [1, 2, 3, 4, 8])
def test_pads_on_the_left_of_a_fresh_row_leak_into_no_tap_and_into_no_history(case, left, history):
  x, taps, empty = case
  count, right = LENGTH - left, 2  # pads on both sides
  rows = jnp.pad(x[:, :count], ((0, 0), (left, right), (0, 0)), constant_values=jnp.nan)
  place = jnp.arange(left + count + right)[None]
  valid = jnp.broadcast_to((place >= left) & (place < left + count), rows.shape[:2])
  y, new_history = short_conv(rows, taps, None if history == "none" else 0 * empty, valid=valid)
  expected, expected_history = short_conv(x[:, :count], taps, None)
  np.testing.assert_array_equal(y[:, left : left + count], expected)
  np.testing.assert_array_equal(new_history, expected_history)


def test_later_inputs_change_no_earlier_output(case):
  x, taps, history = case
  y, _ = short_conv(x, taps, history)
  for t in range(1, LENGTH):
    found, _ = short_conv(x.at[:, t:].set(jnp.nan), taps, history)
    np.testing.assert_array_equal(found[:, :t], y[:, :t])
    assert np.isnan(found[:, t]).all()


def test_rows_do_not_see_each_other(case):
  x, taps, history = case
  lengths = jnp.array([11, 4, 0])
  valid = jnp.arange(LENGTH)[None] < lengths[:, None]
  found = short_conv(x, taps, history, valid=valid)
  for order in ([2, 0, 1], [1]):
    rows = jnp.array(order)
    for a, b in zip(short_conv(x[rows], taps, history[rows], valid=valid[rows]), found, strict=True):
      np.testing.assert_array_equal(a, b[rows])
  poisoned = short_conv(x.at[0].set(jnp.nan), taps, history.at[0].set(jnp.nan), valid=valid)
  for a, b in zip(poisoned, found, strict=True):
    np.testing.assert_array_equal(a[1:], b[1:])


@pytest.mark.parametrize("length", [1, LENGTH])
def test_a_row_without_a_real_input_keeps_every_bit_of_its_history(case, length):
  x, taps, history = case
  strange = jnp.resize(jnp.array([-0.0, 1e-42, jnp.inf, jnp.nan, 2.0]), history.shape)
  _, after = short_conv(jnp.full_like(x[:, :length], jnp.nan), taps, strange, valid=jnp.zeros((BATCH, length), bool))
  np.testing.assert_array_equal(*(np.asarray(a).view(np.uint32) for a in (after, strange)))


def test_heads_and_head_channels_may_be_two_axes(case):
  x, taps, history = (a.repeat(2, axis=-1) for a in case)
  flat, flat_history = short_conv(x, taps, history)
  pair, pair_history = short_conv(*(a.reshape(*a.shape[:-1], CHANNELS, 2) for a in (x, taps, history)))
  np.testing.assert_array_equal(pair.reshape(flat.shape), flat)
  np.testing.assert_array_equal(pair_history.reshape(flat_history.shape), flat_history)


@pytest.mark.parametrize("garbage", [1e6, np.nan])
def test_padded_row_equals_the_row_alone_whatever_its_pads_hold(case, garbage):
  x, taps, history = case
  for lengths in ([0, 1, 2], [3, 4, 11]):
    valid = jnp.arange(LENGTH)[None] < jnp.array(lengths)[:, None]
    y, new_history = short_conv(jnp.where(valid[..., None], x, garbage), taps, history, valid=valid)
    for row, n in enumerate(lengths):
      alone = jnp.concatenate([history[row], x[row, :n]])
      np.testing.assert_array_equal(new_history[row], alone[n:])
      if n:
        expected, _ = short_conv(x[row : row + 1, :n], taps, history[row : row + 1])
        np.testing.assert_array_equal(y[row, :n], expected[0])


def test_pad_in_a_single_step_keeps_the_history(case):
  x, taps, history = case
  valid = jnp.array([True, False, True])[:, None]
  _, new_history = short_conv(jnp.where(valid[..., None], x[:, :1], jnp.nan), taps, history, valid=valid)
  _, stepped = short_conv(x[:, :1], taps, history)
  np.testing.assert_array_equal(new_history, np.where(valid[..., None], stepped, history))


def documents_alone(x, taps, history, starts):
  """Outputs of one row, each document convolved by itself, and the history that the last one leaves."""
  bounds = [0, *starts, len(x)]
  parts = []
  for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
    before = history if i == 0 else 0 * history
    y, after = float64_conv(x[None, start:stop], taps, before[None])
    parts.append(y[0])
  return np.concatenate(parts), after[0]


@pytest.mark.parametrize("starts", [[[0], [1], [10]], [[4], [], [2, 3, 4]], [[1, 9], [0, 5], [8, 10]]])
def test_packed_documents_equal_separate_ones_and_leave_only_the_last_ones_history(case, starts):
  x, taps, history = case
  resets = jnp.stack([jnp.isin(jnp.arange(LENGTH), jnp.array(row)) for row in starts])
  y, new_history = short_conv(x, taps, history, resets=resets)
  for row, row_starts in enumerate(starts):
    expected, expected_history = documents_alone(x[row], taps, history[row], row_starts)
    assert_near(y[row], expected)
    np.testing.assert_array_equal(new_history[row], expected_history.astype(np.float32))


def test_packed_documents_before_pads_leave_the_last_real_ones_history(case):
  x, taps, history = case
  lengths = [6, 2, 0]
  valid = jnp.arange(LENGTH)[None] < jnp.array(lengths)[:, None]
  # The start at 8 is a pad in every row, and so is every one of the last row.
  resets = jnp.zeros((BATCH, LENGTH), bool).at[:, jnp.array([1, 5, 8])].set(True)
  y, new_history = short_conv(x, taps, history, valid=valid, resets=resets)
  for row, starts in enumerate([[1, 5], [1], []]):
    expected, expected_history = documents_alone(x[row, : lengths[row]], taps, history[row], starts)
    assert_near(y[row, : lengths[row]], expected)
    np.testing.assert_array_equal(new_history[row], expected_history.astype(np.float32))


def test_low_precision_inputs_accumulate_in_float32_and_keep_their_dtype_in_the_history(case):
  x, taps, history = (a.astype(jnp.bfloat16) for a in case)
  y, new_history = short_conv(x, taps, history)
  wide, wide_history = short_conv(*(a.astype(jnp.float32) for a in (x, taps, history)))
  assert y.dtype == jnp.float32
  np.testing.assert_array_equal(y, wide)
  assert new_history.dtype == jnp.bfloat16
  np.testing.assert_array_equal(new_history.astype(jnp.float32), wide_history)
