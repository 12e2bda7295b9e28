from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kimi_k3.convert import fp8_block, mxfp4
from kimi_k3.errors import InputError

BLOCK = 128
# Every finite code by the definition of E4M3: 1 bit of sign, 4 of exponent with bias 7, 3 of mantissa; 0x7F is NaN.
MAGNITUDES = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]


def slow_scale(block: np.ndarray) -> float:
  """The smallest power of two, at least 2**-117, by which the largest weight is at most 448; 1 for zeros."""
  largest = np.abs(block).max()
  if largest == 0:
    return 1.0
  exponent = -117
  while largest / 2.0**exponent > 448:
    exponent += 1
  return 2.0**exponent


def slow_code(value: float) -> int:
  """The nearest code of a magnitude; of two that are as near, the even one."""
  distances = [abs(value - magnitude) for magnitude in MAGNITUDES]
  nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
  return next((code for code in nearest if code % 2 == 0), nearest[0])


def slow_encode(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Element by element, in float64, which holds every bfloat16 and every quotient by a power of two."""
  values = weights.astype(np.float64)
  scales = np.empty([-(-size // BLOCK) for size in weights.shape])
  for i, j in np.ndindex(*scales.shape):
    scales[i, j] = slow_scale(values[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK])
  codes = np.empty(weights.shape, np.uint8)
  for i, j in np.ndindex(*weights.shape):
    sign = 0x80 if np.signbit(values[i, j]) else 0
    codes[i, j] = sign | slow_code(abs(values[i, j]) / scales[i // BLOCK, j // BLOCK])
  return codes, scales


def widened(codes, scales) -> np.ndarray:
  """Weights in float64, where every product is exact."""
  spread = np.repeat(np.repeat(scales.astype(np.float64), BLOCK, axis=0), BLOCK, axis=1)
  return codes.astype(np.float64) * spread[: codes.shape[0], : codes.shape[1]]


def random_weights(*shape, seed=0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("shape", [(130, 4), (4, 130), (1, 257), (1, 1)])
def test_codes_and_scales_are_those_of_the_slow_definition_partial_blocks_included(shape):
  rng = np.random.default_rng(1)
  spread = np.ldexp(rng.standard_normal(shape), rng.integers(-20, 4, shape))  # down into subnormal codes
  weights = spread.astype(ml_dtypes.bfloat16)
  codes, scales = fp8_block.encode(weights, "w")
  expected_codes, expected_scales = slow_encode(weights)
  assert (codes.dtype, scales.dtype) == (ml_dtypes.float8_e4m3fn, np.float32)
  assert np.array_equal(codes.view(np.uint8), expected_codes)
  assert np.array_equal(scales, expected_scales)


def test_every_bfloat16_up_to_the_largest_is_rounded_to_nearest_with_ties_to_even():
  """Under a scale of 1, kept by 448 in the same block: 65536 bit patterns in rows of 127."""
  every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  every = every[np.abs(every.astype(np.float32)) <= 448]
  every = np.pad(every, (0, -len(every) % 127)).reshape(-1, 127)
  weights = np.concatenate([np.full((len(every), 1), 448, ml_dtypes.bfloat16), every], axis=1)
  codes, scales = fp8_block.encode(weights, "w")
  assert np.all(scales == 1)
  found = codes[:, 1:].view(np.uint8).ravel()
  values = every.astype(np.float64).ravel()
  magnitudes = np.array(MAGNITUDES)
  above = np.searchsorted(magnitudes, np.abs(values)).clip(1)
  low, high = magnitudes[above - 1], magnitudes[above]
  distance = np.abs(values) - (low + high) / 2
  expected = np.where((distance > 0) | (distance == 0) & (above % 2 == 0), above, above - 1)
  assert np.array_equal(found & 0x7F, expected)
  assert np.array_equal(found >> 7, np.signbit(values))


@pytest.mark.parametrize("exponent", [-117, -30, 0, 120])
def test_every_code_times_a_scale_is_exact_and_normal_in_bfloat16(exponent):
  codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
  codes = codes[np.isfinite(codes) & (np.abs(codes) * 2.0**exponent < 2.0**128)]
  exact = codes * 2.0**exponent
  with np.errstate(all="raise"):
    rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
  assert np.array_equal(rounded, exact)
  assert np.abs(exact[exact != 0]).min() >= 2.0**-126


def test_a_normal_value_is_off_by_at_most_2_to_the_minus_4_of_itself():
  weights = random_weights(384, 384)
  codes, scales = fp8_block.encode(weights, "w")
  exact, found = weights.astype(np.float64), widened(codes, scales)
  normal = np.abs(codes.astype(np.float64)) >= 2.0**-6
  assert normal.mean() > 0.99
  assert (np.abs(found - exact)[normal] / np.abs(exact)[normal]).max() <= 2.0**-4
  spread = np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)
  assert (np.abs(found - exact)[~normal] / spread[~normal]).max() <= 2.0**-10


def test_a_packed_matrix_converts_exactly_down_to_2_to_the_minus_16_of_its_blocks_largest():
  """Two groups of 32 with scales up to 2**15 apart, so that 0.5 stands beside 6."""
  rng = np.random.default_rng(0)
  packed, scales = rng.integers(0, 256, (64, 32), np.uint8), rng.integers(112, 125, (64, 2), np.uint8)
  scales[0, 0], packed[0, 0] = 124, 0x77  # the largest: 6 * 2**-3
  weights = mxfp4.decode(packed, scales)
  least = np.abs(weights[weights != 0].astype(np.float64)).min()
  assert least / np.abs(weights.astype(np.float64)).max() >= 2.0**-16
  assert np.array_equal(widened(*fp8_block.encode(weights, "w")), weights.astype(np.float64))


def test_a_weight_further_below_the_largest_is_rounded_to_the_nearest_multiple():
  weights = np.array([[256, 1.5 * 2.0**-9, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10]], ml_dtypes.bfloat16)
  codes, scales = fp8_block.encode(weights, "w")
  assert scales.item() == 1
  assert widened(codes, scales).tolist() == [[256, 2 * 2.0**-9, 2.0**-9, 0, 2.0**-9]]


def test_a_block_of_zeros_has_scale_1_and_zeros_keep_their_sign():
  weights = np.zeros((130, 256), ml_dtypes.bfloat16)
  weights[:, 128:], weights[0, 0], weights[129, 200] = 3, -0.0, -0.0
  codes, scales = fp8_block.encode(weights, "w")
  assert scales.tolist() == [[1, 2.0**-7], [1, 2.0**-7]]
  assert codes.view(np.uint8)[[0, 129, 1], [0, 200, 1]].tolist() == [0x80, 0x80, 0]


def test_the_least_weights_go_to_zero_and_the_largest_stay_finite():
  tiny = np.array([[2.0**-126, 2.0**-128, -(2.0**-133)]], ml_dtypes.bfloat16)
  codes, scales = fp8_block.encode(tiny, "w")
  assert scales.item() == 2.0**-117
  assert widened(codes, scales).tolist() == [[2.0**-126, 0, 0]]
  large = np.array([[fp8_block.LARGEST_WEIGHT, -fp8_block.LARGEST_WEIGHT]], ml_dtypes.bfloat16)
  assert np.array_equal(widened(*fp8_block.encode(large, "w")), large.astype(np.float64))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.3e38])
def test_what_no_code_stands_for_is_refused_by_name_and_counted(value):
  weights = random_weights(200, 40)
  weights[199, 39] = weights[0, 1] = value
  for convert in (fp8_block.encode, fp8_block.block_scales):
    with pytest.raises(InputError, match=r"o_proj\.weight: 2 weight\(s\) are NaN, infinite or above 3\.19e\+38 \(the"):
      convert(weights, "o_proj.weight")


@pytest.mark.parametrize("cut", [128, 256])
def test_rows_from_a_multiple_of_128_on_are_encoded_as_in_the_whole(cut):
  weights = random_weights(300, 150) * np.linspace(0.01, 9, 300).astype(ml_dtypes.bfloat16)[:, None]
  codes, scales = fp8_block.encode(weights, "w")
  parts = [fp8_block.encode(part, "w") for part in (weights[:cut], weights[cut:])]
  assert np.concatenate([part[0] for part in parts]).tobytes() == codes.tobytes()
  assert np.array_equal(np.concatenate([part[1] for part in parts]), scales)
  assert np.array_equal(fp8_block.block_scales(weights, "w"), scales)
