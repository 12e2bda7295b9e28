"""What was done to an array is told from the array."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kimi_k3.convert import diagnose


def random(*shape: int, dtype: type = np.uint8) -> np.ndarray:
  return np.random.default_rng(0).integers(0, 255, shape).astype(dtype)


@pytest.mark.parametrize("shift", [1, -1, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_roll_is_told_by_axis_and_distance(shift, axis):
  expected = random(12, 9)
  looks = diagnose.pattern(np.roll(expected, shift, axis), expected)
  way = "too far" if shift > 0 else "too early"
  assert looks == f"shifted: rows along axis {axis} stand {abs(shift)} place(s) {way}, around the end"


def test_a_shift_out_of_the_end_is_told():
  expected = random(12, 9)
  found = expected.copy()
  found[2:] = expected[:-2]
  assert diagnose.pattern(found, expected) == "shifted: rows along axis 0 stand 2 place(s) too far"


def test_a_shift_of_few_distinct_values_is_told():
  expected = random(64, 1) % 3
  assert "stand 1 place(s) too far" in (diagnose.pattern(np.roll(expected, 1, 0), expected) or "")


def test_axes_in_another_order_are_told_whatever_the_shape_says():
  expected = random(4, 6, 8, dtype=np.float32)
  assert diagnose.pattern(expected.transpose(2, 1, 0).reshape(4, 6, 8), expected) == (
    "transposed: its axes stand in the order (2, 1, 0)"
  )
  assert diagnose.pattern(expected[0].T.reshape(6, 8), expected[0]) == "transposed"


def test_what_is_no_pattern_is_not_called_one():
  expected = random(12, 9)
  found = expected.copy()
  found[3, 4] ^= 1
  assert diagnose.pattern(found, expected) is None
  assert diagnose.pattern(random(12, 9) ^ 77, expected) is None
  assert diagnose.pattern(np.zeros_like(expected), expected) == "all values are 0"


def test_values_are_compared_by_their_bits():
  nan, zero = np.array([np.nan, 0.0], ml_dtypes.bfloat16), np.array([np.nan, -0.0], ml_dtypes.bfloat16)
  assert diagnose.same(nan, nan.copy())
  assert not diagnose.same(nan, zero)
  assert diagnose.num_different(nan, zero) == 1
  first = diagnose.first_difference(zero, nan)
  assert (first.index, first.bits) == ((1,), 1)
