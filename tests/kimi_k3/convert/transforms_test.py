from __future__ import annotations

import numpy as np
import pytest

from kimi_k3.convert import transforms
from kimi_k3.convert.transforms import Transform
from kimi_k3.errors import InputError


def apply(transform, shape, **stored):
  return transforms.apply(transform, tuple(stored), stored.__getitem__, shape)


@pytest.mark.parametrize(
  ("transform", "stored", "leaf"),
  [
    (Transform.RESHAPE, (1, 8), (8,)),
    (Transform.RESHAPE, (1, 1, 4, 1), (4,)),
    (Transform.TRANSPOSE, (6, 8), (8, 6)),
    (Transform.TRANSPOSE, (6, 8), (8, 2, 3)),
    (Transform.TRANSPOSE, (8, 6), (2, 3, 8)),
    (Transform.TRANSPOSE, (6, 1, 4), (4, 2, 3)),
  ],
)
def test_a_layout_change_is_undone_byte_for_byte(transform, stored, leaf):
  tensor = np.random.default_rng(0).standard_normal(stored).astype(np.float32)
  found = apply(transform, leaf, x=tensor)
  assert found.shape == leaf
  assert transforms.invert(transform, np.ascontiguousarray(found), stored).tobytes() == tensor.tobytes()


def test_heads_become_an_axis_of_their_own_behind_the_input():
  weight = np.arange(2 * 3 * 4).reshape(6, 4)  # [H * K, D]: rows of head 0, then of head 1
  kernel = apply(Transform.TRANSPOSE, (4, 2, 3), x=weight)
  assert kernel[:, 1, 0].tolist() == weight[3].tolist()
  assert kernel[:, 1, 2].tolist() == weight[5].tolist()


def test_taps_come_first_in_a_convolution():
  weight = np.arange(6 * 4).reshape(6, 1, 4)
  taps = apply(Transform.TRANSPOSE, (4, 2, 3), x=weight)
  assert taps[3, 1, 0] == weight[3, 0, 3]


def test_zero_padding_is_dropped_and_comes_back():
  stored = np.array([1.5, -0.0, np.nan, 0, 0], np.float32)
  found = apply(Transform.NARROW, (3,), x=stored)
  assert transforms.invert(Transform.NARROW, found, (5,)).tobytes() == stored.tobytes()


@pytest.mark.parametrize("value", [1e-45, -0.0, np.nan, -1.0])
def test_padding_that_is_not_all_zero_bits_is_refused_by_name(value):
  stored = np.zeros(8, np.float32)
  stored[5] = value
  with pytest.raises(InputError, match=r"A_log: 4 heads then zero padding expected, 1 of 4 non-zero past row 4"):
    apply(Transform.NARROW, (4,), A_log=stored)


def test_decoding_is_transposed_and_cannot_be_undone(reference):
  rng = np.random.default_rng(0)
  codes, scales = rng.integers(0, 256, (6, 32), np.uint8), rng.integers(100, 130, (6, 2), np.uint8)
  found = apply(Transform.DECODE, (64, 6), codes=codes, scales=scales)
  assert np.array_equal(found.astype(np.float64), reference.mxfp4_decode(codes, scales).T)
  with pytest.raises(ValueError, match="cannot be packed again"):
    transforms.invert(Transform.DECODE, found, codes.shape)


@pytest.mark.parametrize(("transform", "shape"), [(Transform.SCALES, (6, 2)), (Transform.DECODE, (64, 6))])
def test_a_nan_scale_is_refused_kept_packed_or_decoded(transform, shape):
  codes, scales = np.zeros((6, 32), np.uint8), np.full((6, 2), 120, np.uint8)
  scales[2, 1] = 255
  with pytest.raises(InputError, match="w1_scale: scale byte 255"):
    apply(transform, shape, w1_packed=codes, w1_scale=scales)


def test_scales_are_kept_without_reading_the_codes_when_none_is_suspect():
  scales = np.full((6, 2), 252, np.uint8)
  found = transforms.apply(Transform.SCALES, ("codes", "scales"), {"scales": scales}.__getitem__, (6, 2))
  assert found.tobytes() == scales.tobytes()
