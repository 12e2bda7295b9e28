from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from kimi_k3.convert import mxfp4
from kimi_k3.errors import InputError

SCALES = np.arange(253, dtype=np.uint8)  # Every scale byte that bfloat16 can hold under any code.


def every_byte_under_every_scale():
  """Packed [253, 256], scale [253, 16]: row s holds all bytes under scale byte s."""
  packed = np.tile(np.arange(256, dtype=np.uint8), (len(SCALES), 1))
  return packed, np.repeat(SCALES[:, None], 256 // mxfp4.PACKED_GROUP, axis=1)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_every_byte_under_every_scale_decodes_bit_for_bit_as_the_reference(reference, dtype):
  packed, scale = every_byte_under_every_scale()
  expected = reference.mxfp4_decode(packed, scale, dtype=dtype)
  found = mxfp4.decode(packed, scale, dtype)
  assert found.dtype == dtype
  assert found.tobytes() == expected.tobytes()


def test_bfloat16_is_exact_subnormals_and_minus_zero_included(reference):
  packed, scale = every_byte_under_every_scale()
  expected = reference.mxfp4_decode(packed, scale)
  found = mxfp4.decode(packed, scale).astype(np.float64)
  assert np.array_equal(found, expected)
  assert np.array_equal(np.signbit(found), np.signbit(expected))
  assert np.abs(found[found != 0]).min() == 2.0**-128


def test_the_low_nibble_is_the_even_element():
  packed = np.full((1, mxfp4.PACKED_GROUP), 0xF2, np.uint8)  # codes 2 (1.0), then 15 (-6.0)
  decoded = mxfp4.decode(packed, np.array([[128]], np.uint8))
  assert decoded[0, :4].astype(float).tolist() == [2.0, -12.0, 2.0, -12.0]


def test_a_matrix_larger_than_one_block_decodes_as_its_rows(monkeypatch):
  rng = np.random.default_rng(0)
  packed, scale = rng.integers(0, 256, (50, 48), np.uint8), rng.integers(100, 130, (50, 3), np.uint8)
  whole = mxfp4.decode(packed, scale)
  monkeypatch.setattr(mxfp4, "_BLOCK_BYTES", 100)
  assert whole.tobytes() == mxfp4.decode(packed, scale).tobytes()
  assert whole[7:8].tobytes() == mxfp4.decode(packed[7:8], scale[7:8]).tobytes()


def test_codes_and_scales_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="does not fit"):
    mxfp4.decode(np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8))


@pytest.mark.parametrize(
  ("scale", "code", "message"),
  [
    (255, 0x0, "scale byte 255 at row 3, group 1 means NaN"),
    (253, 0x6, "scale byte 253 at row 3, group 1 overflows bfloat16"),
    (253, 0xF, "overflows"),
    (254, 0x4, "overflows"),
  ],
)
def test_what_cannot_be_represented_is_refused_by_name(scale, code, message):
  packed, scales = np.zeros((4, 32), np.uint8), np.full((4, 2), 252, np.uint8)
  packed[3, 31], scales[3, 1] = code << 4, scale
  with pytest.raises(InputError, match=rf"w2\.weight_scale: .*{message}"):
    mxfp4.check(packed, scales, "w2.weight_scale")


@pytest.mark.parametrize(("scale", "code"), [(252, 0xF), (253, 0x5), (254, 0x3), (254, 0xB)])
def test_large_scales_pass_where_every_weight_is_finite(scale, code):
  packed, scales = np.full((4, 32), code * 0x11, np.uint8), np.full((4, 2), scale, np.uint8)
  mxfp4.check(packed, scales, "w2.weight_scale")
  assert np.isfinite(mxfp4.decode(packed, scales).astype(np.float64)).all()


def slow_pack(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Section 6.3 of the OCP MX specification, element by element: codes [out, in] and scale bytes [out, groups].

  The shared exponent is that of the largest magnitude less 2, the exponent of E2M1's largest; elements are rounded to
  nearest, ties to even, and saturate. Exponents below E8M0's least become it.
  """
  out, inputs = weights.shape
  codes, scales = np.empty((out, inputs), np.uint8), np.empty((out, inputs // 32), np.uint8)
  for i, g in np.ndindex(*scales.shape):
    group = [float(w) for w in weights[i, 32 * g : 32 * g + 32]]
    largest = max(map(abs, group))
    exponent = max(-127, math.frexp(largest)[1] - 1 - 2) if largest else -127
    scales[i, g] = exponent + 127
    for j, value in enumerate(group):
      distances = [abs(abs(value) / 2.0**exponent - m) for m in mxfp4.MAGNITUDES]
      nearest = [code for code in range(8) if distances[code] == min(distances)]
      code = next((c for c in nearest if c % 2 == 0), nearest[0])
      codes[i, 32 * g + j] = code | (8 if math.copysign(1, value) < 0 else 0)
  return codes, scales


def awkward_weights() -> np.ndarray:
  """Groups of random size, of ties, of zeros, of subnormals, and of the largest numbers."""
  rng = np.random.default_rng(0)
  random = np.ldexp(rng.standard_normal((40, 32)), rng.integers(-140, 120, (40, 1)))
  mixed = np.ldexp(rng.standard_normal((38, 32)), rng.integers(-9, 4, (38, 32)))
  ties = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 6.5, 7, 7.96875, -0.25, -5, -0.0, 0.126, 0.24] * 2])
  few = np.zeros((3, 32))
  few[0, 5], few[1, 7], few[2, :4] = -(2.0**-133), 1.9921875 * 2.0**127, [2.0**-126, 2.0**-127, 2.0**-128, -(2.0**-129)]
  return np.concatenate([random, mixed, ties, ties / 2, ties * 2.0**-126, few]).astype(ml_dtypes.bfloat16)


def test_packing_is_that_of_the_slow_definition():
  weights = awkward_weights()
  codes, scales = slow_pack(weights)
  for groups in (1, 6):
    matrix = weights.reshape(-1, 32 * groups)
    packed, found = mxfp4.pack(matrix, "w")
    assert np.array_equal(found.ravel(), scales.ravel())
    assert np.array_equal(np.stack([packed & 0xF, packed >> 4], axis=-1).ravel(), codes.ravel())
    assert np.array_equal(mxfp4.group_scales(matrix, "w"), found)


def test_what_was_packed_comes_back_bit_for_bit_from_its_weights():
  packed, scale = every_byte_under_every_scale()
  few = np.random.default_rng(0).integers(0, 256, (9, 16 * 9), np.uint8) & 0x33  # magnitudes up to 1.5
  for codes, scales in ((packed, scale), (few, np.full((9, 9), 254, np.uint8))):
    weights = mxfp4.decode(codes, scales)
    again = mxfp4.decode(*mxfp4.pack(weights, "w"))
    assert again.tobytes() == weights.tobytes()


def test_a_group_of_zeros_has_the_least_scale_and_keeps_its_signs():
  weights = np.zeros((2, 64), ml_dtypes.bfloat16)
  weights[1, 3] = -0.0
  packed, scale = mxfp4.pack(weights, "w")
  assert np.all(scale == mxfp4.ZERO_GROUP_SCALE)
  assert np.count_nonzero(packed) == 1
  assert packed[1, 1] == 0x80


def test_a_matrix_larger_than_one_block_is_packed_as_its_rows(monkeypatch):
  weights = np.random.default_rng(0).standard_normal((50, 96)).astype(ml_dtypes.bfloat16)
  whole = mxfp4.pack(weights, "w")
  monkeypatch.setattr(mxfp4, "_BLOCK_WEIGHTS", 300)
  for found, expected in zip(mxfp4.pack(weights, "w"), whole, strict=True):
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_cannot_be_packed(value):
  weights = np.ones((3, 32), ml_dtypes.bfloat16)
  weights[1, 31] = weights[2, 0] = value
  with pytest.raises(InputError, match=r"w1\.weight: 2 weight\(s\) are NaN or infinite"):
    mxfp4.pack(weights, "w1.weight")


def test_inputs_that_are_no_whole_groups_cannot_be_packed():
  with pytest.raises(InputError, match=r"w2\.weight: 48 inputs, expected a multiple of 32"):
    mxfp4.pack(np.ones((3, 48), ml_dtypes.bfloat16), "w2.weight")
