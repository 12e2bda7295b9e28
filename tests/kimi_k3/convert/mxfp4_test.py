from __future__ import annotations

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
